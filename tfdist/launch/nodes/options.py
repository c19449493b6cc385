"""The options of `tfdist run` by which several hosts find each other."""

import argparse
import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tfdist.launch.errors import UsageError

TOKEN_VARIABLE = "TFDIST_TOKEN"
MIN_TOKEN_CHARACTERS = 16
_MAKE_TOKEN = 'python -c "import secrets; print(secrets.token_hex(16))"'
_ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):(?P<port>[0-9]{1,5})")
_MAX_TOKEN_BYTES = 4096


@dataclasses.dataclass(frozen=True)
class NodeOptions:
    """One host of several.

    Args:
        nodes: Number of hosts, at least 2.
        rank: Which of them this is, from 0.
        host: Where the rendezvous is.
        port: Its port.
        address: Where other hosts reach this host's workers; None: where its connection to the rendezvous leaves from.
        token: What all of them know.
    """

    nodes: int
    rank: int
    host: str
    port: int
    address: str | None
    token: str = dataclasses.field(repr=False)


def add_node_options(
    parser: argparse.ArgumentParser, *, at_least_one: Callable[[str], Any], count: Callable[[str], Any]
) -> None:
    """Adds the options.

    Args:
        parser: Of `tfdist run`.
        at_least_one: Reads a whole number of at least 1.
        count: Reads a whole number of at least 0.
    """
    group = parser.add_argument_group(
        "several hosts",
        "Start the same command on every host, each with its own --node-rank. --workers is the number on this host, "
        "--min-workers counts over all hosts.",
    )
    group.add_argument("--nodes", type=at_least_one, default=1, metavar="H", help="number of hosts (default: 1)")
    group.add_argument("--node-rank", type=count, metavar="I", help="which of them this is, from 0")
    group.add_argument(
        "--rendezvous",
        metavar="HOST:PORT",
        help="where the supervisors find each other: the host of node 0, and a free port there",
    )
    group.add_argument(
        "--address",
        metavar="A",
        help="where other hosts reach the workers of this one (default: the address from which it reaches the "
        "rendezvous)",
    )
    group.add_argument(
        "--token-file",
        type=Path,
        metavar="PATH",
        help=f"a file with the secret without which no host joins (default: the variable {TOKEN_VARIABLE})",
    )


def read_node_options(options: argparse.Namespace, environ: Mapping[str, str]) -> NodeOptions | None:
    """Returns what the options say of several hosts, or None for a run on one.

    Raises:
        UsageError: If one is missing or wrong.
    """
    nodes, rank = options.nodes, options.node_rank
    if rank is not None and rank >= nodes:
        raise UsageError(
            f"The host's number is too high. Received: --node-rank {rank} --nodes {nodes}. Expected: 0 to {nodes - 1}. "
            "Count the hosts from 0."
        )
    if nodes == 1:
        return None
    missing = [name for name, value in (("--node-rank", rank), ("--rendezvous", options.rendezvous)) if value is None]
    if missing:
        raise UsageError(
            f"Several hosts must find each other. Received: --nodes {nodes} without {' and '.join(missing)}. Expected: "
            f"--nodes {nodes} --node-rank I --rendezvous HOST:PORT, the host of node 0 and a free port there."
        )
    match = _ADDRESS.fullmatch(options.rendezvous)
    if match is None or not 1 <= int(match["port"]) <= 65_535:
        raise UsageError(
            f"The rendezvous is wrong. Received: --rendezvous {options.rendezvous}. Expected: HOST:PORT, for example "
            "node0:29400 or [fd00::1]:29400. Name the host of node 0 and a free port there."
        )
    if options.network == "private":
        raise UsageError(
            f"Workers in a private network cannot reach other hosts. Received: --nodes {nodes} --network private. "
            "Expected: --network host or none. Leave --network out."
        )
    host = match["host"].strip("[]")
    return NodeOptions(nodes, rank, host, int(match["port"]), options.address, _token(options.token_file, environ))


def _token(path: Path | None, environ: Mapping[str, str]) -> str:
    if path is None:
        where, token = f"the variable {TOKEN_VARIABLE}", environ.get(TOKEN_VARIABLE, "").strip()
    else:
        where, token = f"--token-file {path}", _read(path)
    if len(token) < MIN_TOKEN_CHARACTERS:
        how = f"{len(token)} characters" if token else "nothing"
        raise UsageError(
            f"Several hosts need a secret token, so that nobody else joins. Received: {how} in {where}. Expected: at "
            f"least {MIN_TOKEN_CHARACTERS} characters, the same on every host. Make one by {_MAKE_TOKEN} and give it "
            f"by --token-file or {TOKEN_VARIABLE}, never on the command line."
        )
    return token


def _read(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(_MAX_TOKEN_BYTES).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"The token cannot be read. Received: --token-file {path} ({getattr(error, 'strerror', None) or error}). "
            f"Expected: a text file with at least {MIN_TOKEN_CHARACTERS} characters. Make one by {_MAKE_TOKEN} > {path}"
        ) from error
