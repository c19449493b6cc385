"""The options of `tfdist run` for several hosts."""

import argparse
import re
from collections.abc import Mapping
from pathlib import Path

from tfdist.launch.run_config import TOKEN_VARIABLE, NodeOptions
from tfdist.utils.argument_checks import UsageError, seconds, whole_number

MIN_TOKEN_CHARACTERS = 16
_MAKE_TOKEN = 'python -c "import secrets; print(secrets.token_hex(16))"'
_ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):(?P<port>[0-9]{1,5})")
_MAX_TOKEN_BYTES = 4096


def add_node_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options to the parser of `tfdist run`."""
    group = parser.add_argument_group(
        "several hosts",
        "Start the same command on every host, each with another --node-rank. --workers is the number on this host; "
        "--min-workers counts the workers of all hosts.",
    )
    group.add_argument(
        "--nodes", type=whole_number(at_least=1, example=2), default=1, metavar="H", help="number of hosts (default: 1)"
    )
    group.add_argument(
        "--node-rank", type=whole_number(at_least=0, example=0), metavar="I", help="number of this host, from 0"
    )
    group.add_argument(
        "--rendezvous",
        metavar="HOST:PORT",
        help="where the supervisors meet: the host of node 0 and a free port there",
    )
    group.add_argument(
        "--rejoin-timeout",
        type=seconds(example=60),
        metavar="S",
        help="seconds to wait for a lost host to join again, after which the run ends with exit code 69; 0 where "
        "nobody starts a lost supervisor again (default: that of --start-timeout)",
    )
    group.add_argument(
        "--address",
        metavar="A",
        help="address at which other hosts reach the workers of this one (default: the address from which it connects "
        "to the rendezvous)",
    )
    group.add_argument(
        "--token-file",
        type=Path,
        metavar="PATH",
        help=f"file with the secret that a host needs to join (default: the variable {TOKEN_VARIABLE})",
    )


def read_node_options(options: argparse.Namespace, environ: Mapping[str, str]) -> NodeOptions | None:
    """Returns the options of a run on several hosts, or None for a run on one.

    Raises:
        UsageError: If an option is missing or invalid.
    """
    nodes, rank = options.nodes, options.node_rank
    if rank is not None and rank >= nodes:
        raise UsageError(
            f"--node-rank is too high. Received: --node-rank {rank} --nodes {nodes}. Expected: 0 to {nodes - 1}. "
            "Count the hosts from 0, or correct --nodes."
        )
    if nodes == 1:
        return None
    missing = [name for name, value in (("--node-rank", rank), ("--rendezvous", options.rendezvous)) if value is None]
    if missing:
        raise UsageError(
            f"Several hosts need a rendezvous. Received: --nodes {nodes} without {' and '.join(missing)}. Expected: "
            f"--nodes {nodes} --node-rank I --rendezvous HOST:PORT, the host of node 0 and a free port there."
        )
    match = _ADDRESS.fullmatch(options.rendezvous)
    if match is None or not 1 <= int(match["port"]) <= 65_535:
        raise UsageError(
            f"Invalid rendezvous. Received: --rendezvous {options.rendezvous}. Expected: HOST:PORT, for example "
            "node0:29400 or [fd00::1]:29400. Name the host of node 0 and a free port there."
        )
    if options.network == "private":
        raise UsageError(
            f"Workers in a private network cannot reach other hosts. Received: --nodes {nodes} --network private. "
            "Expected: --network host or none. Remove --network."
        )
    host = match["host"].strip("[]")
    return NodeOptions(nodes, rank, host, int(match["port"]), options.address, _token(options.token_file, environ))


def _token(path: Path | None, environ: Mapping[str, str]) -> str:
    if path is None:
        source, token = f"the variable {TOKEN_VARIABLE}", environ.get(TOKEN_VARIABLE, "").strip()
    else:
        source, token = f"--token-file {path}", _read(path)
    if len(token) < MIN_TOKEN_CHARACTERS:
        how = f"{len(token)} characters" if token else "nothing"
        raise UsageError(
            f"Several hosts need a secret token. Received: {how} in {source}. Expected: at "
            f"least {MIN_TOKEN_CHARACTERS} characters, the same on every host. Create one by {_MAKE_TOKEN} and pass "
            f"it by --token-file or {TOKEN_VARIABLE}, never on the command line."
        )
    return token


def _read(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(_MAX_TOKEN_BYTES).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"The token cannot be read. Received: --token-file {path} ({getattr(error, 'strerror', None) or error}). "
            f"Expected: a text file of at least {MIN_TOKEN_CHARACTERS} characters. Create one by {_MAKE_TOKEN} > {path}"
        ) from error
