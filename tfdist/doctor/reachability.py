"""Which tasks did not answer which others, and what to do about it."""

from collections.abc import Mapping, Set

from tfdist.doctor.finding import ERROR, OK, Finding
from tfdist.doctor.greeting import OTHER_CLUSTER, OTHER_PROTOCOL, OTHER_TOKEN, TOKEN_VARIABLE

_REMEDIES = {
    "connection refused": "Start tfdist doctor on that host at the same time as on the others, or give it longer by "
    "--timeout.",
    "no answer": "Start the host, let the port through the firewall, or correct the address.",
    "the name": "Correct the name in the cluster's description, or repair /etc/hosts or the name server; in Kubernetes "
    "the headless service needs publishNotReadyAddresses: true.",
    "its name": "Repair the name server, which takes too long, or write addresses.",
    OTHER_CLUSTER: "Describe the same cluster on all tasks: the same jobs and addresses in the same order.",
    OTHER_TOKEN: f"Set the same {TOKEN_VARIABLE} on all tasks, or on none.",
    OTHER_PROTOCOL: "Install the same tfdist everywhere.",
}
_OTHER_REMEDY = "Look which program has that port there (ss -ltnp), and end it or correct the cluster's description."


def reachability_findings(
    missing: Mapping[str, Mapping[str, str]],
    addresses: Mapping[str, str],
    visitors: Set[str] = frozenset(),
) -> list[Finding]:
    """Returns an error for each task that did not answer, for each reason; or that all did.

    Args:
        missing: By task that asked, the tasks that did not answer it, with the reason.
        addresses: The address of every task.
        visitors: Tasks that have reached this one.

    >>> [found] = reachability_findings({"worker 0": {"worker 1": "no answer in 5 s"}}, {"worker 1": "b:2222"})
    >>> found.found
    'worker 1 at b:2222 did not answer worker 0: no answer in 5 s'
    """
    askers: dict[tuple[str, str], list[str]] = {}
    for asker, reasons in missing.items():
        for task, reason in reasons.items():
            askers.setdefault((task, reason), []).append(asker)
    findings = []
    for (task, reason), asked in askers.items():
        found = f"{task} at {addresses.get(task, '?')} did not answer {', '.join(asked)}: {reason}"
        if task in visitors:
            found += "; yet it reaches this task, so it runs"
        remedy = next((text for start, text in _REMEDIES.items() if reason.startswith(start)), _OTHER_REMEDY)
        findings.append(Finding(ERROR, "peers", found, "every task to answer every other one", remedy))
    if not findings and len(addresses) > 1:
        findings.append(Finding(OK, "peers", f"all {len(addresses)} tasks answer each other"))
    return findings
