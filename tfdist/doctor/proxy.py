"""Whether gRPC would send what the tasks say to each other to an HTTP proxy.

gRPC's core takes the first of `grpc_proxy`, `https_proxy`, `http_proxy` that is set (lower case only), unless the
target's host ends with an entry of `no_grpc_proxy`, or of `no_proxy` where that is not set, or lies in its subnet.
"""

import ipaddress
import re
from collections.abc import Mapping

from tfdist.doctor.finding import ERROR, OK, WARNING, Finding
from tfdist.doctor.situation import Situation, host_of

_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
_EXCEPTIONS = ("no_grpc_proxy", "no_proxy")


def check_proxy(situation: Situation) -> list[Finding]:
    """Whether a proxy is set, and stands between the tasks."""
    variable = next((name for name in _PROXIES if name in situation.environ), "")
    if not variable or not situation.environ[variable]:
        return [Finding(OK, "proxy", "none for gRPC")]
    found = f"{variable}={without_password(situation.environ[variable])}"
    exceptions = next((name for name in _EXCEPTIONS if name in situation.environ), "")
    found += f", {exceptions}={situation.environ[exceptions]}" if exceptions else ", no no_proxy"
    # This task's own too: it dials itself, where it is the first one.
    hosts = {host_of(address): None for address in situation.addresses.values()}
    caught = [host for host in hosts if not is_excepted(host, situation.environ)]
    if caught:
        remedy = f"unset {variable}, or export no_grpc_proxy={','.join(hosts)} on every host."
        found = f"{found}: gRPC goes through the proxy to {', '.join(caught)}"
        return [Finding(ERROR, "proxy", found, "no proxy between the tasks: TensorFlow would wait for ever", remedy)]
    if hosts:
        return [Finding(OK, "proxy", f"{found}: all tasks are excepted")]
    remedy = f"Before a training on several hosts unset {variable}, or name all hosts in no_grpc_proxy."
    return [Finding(WARNING, "proxy", found, "no proxy for gRPC between workers", remedy)]


def is_excepted(host: str, environ: Mapping[str, str]) -> bool:
    """Whether gRPC goes to `host` without the proxy.

    >>> is_excepted("node1.cluster", {"no_proxy": "localhost,.cluster"}), is_excepted("10.0.0.7", {})
    (True, False)
    >>> is_excepted("10.0.0.7", {"no_grpc_proxy": "10.0.0.0/24"})
    True
    """
    text = next((environ[name] for name in _EXCEPTIONS if name in environ), "")
    entries = [entry.strip().lower() for entry in text.split(",") if entry.strip()]
    return any(host.lower().endswith(entry) or _is_in_subnet(host, entry) for entry in entries)


def without_password(url: str) -> str:
    """Returns a URL as it may be shown.

    >>> without_password("http://me:secret@proxy:3128")
    'http://...@proxy:3128'
    """
    return re.sub(r"//[^/@]*@", "//...@", url)


def _is_in_subnet(host: str, entry: str) -> bool:
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(entry, strict=False)
    except ValueError:
        return False
