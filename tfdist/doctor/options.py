"""The options of `tfdist doctor`."""

import argparse
import math
import re
from pathlib import Path

_DESCRIPTION = """\
Check this machine, or all machines of a cluster, before a training does: versions, devices, cores, memory, limits,
names, ports, proxies, the checkpoints' disk; and between the tasks of a cluster reachability, equal versions, clocks,
round trips and bandwidth, and which compression that suggests.

Without a cluster this machine is checked. With one (TF_CONFIG, srun, Kubernetes) start the command on every host at
the same time: the first task prints the report for all."""

_EPILOG = """\
examples:
  tfdist doctor
  tfdist doctor --workers 2 --checkpoints checkpoints --parameters 25M
  srun --nodes 4 --ntasks-per-node 1 tfdist doctor --checkpoints /shared/run1
  TF_CONFIG=... tfdist doctor --json > report.json

Exit code: 0, warnings or not; 1 if an error was found, on any task; 2 if the command is wrong."""

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9}
_PARAMETERS = re.compile(r"(\d+(?:\.\d+)?)([kmgb]?)")


def add_doctor_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    """Adds the sub-command `doctor` and returns its parser."""
    parser = commands.add_parser(
        "doctor",
        help="check a machine or a cluster before training",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--workers",
        type=_at_least_one,
        metavar="N",
        help="check this machine for N workers, as tfdist run --workers N starts them, and what they exchange here",
    )
    parser.add_argument(
        "--parameters",
        type=parameters,
        default=10_000_000,
        metavar="P",
        help="number of the model's parameters, for example 25M or 1.5G: for memory, disk and compression "
        "(default: 10M)",
    )
    parser.add_argument(
        "--checkpoints", type=Path, metavar="DIR", help="check the directory that FailureRecovery will save to"
    )
    parser.add_argument(
        "--keep", type=_at_least_one, default=3, metavar="K", help="how many checkpoints are kept there (default: 3)"
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=60.0,
        metavar="S",
        help="seconds to wait for the other tasks of the cluster (default: 60)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of lines")
    return parser


def parameters(text: str) -> int:
    """Reads a number of parameters.

    Raises:
        argparse.ArgumentTypeError: If it is none.

    >>> parameters("25M"), parameters("1.5G"), parameters("1000")
    (25000000, 1500000000, 1000)
    """
    match = _PARAMETERS.fullmatch(text.strip().lower())
    number = round(float(match[1]) * _UNITS[match[2]]) if match else 0
    if number < 1:
        raise argparse.ArgumentTypeError(
            f"The number is wrong. Received: {text!r}. Expected: a number of at least 1, with k, M or G behind it if "
            "need be, for example 25M."
        )
    return number


def _at_least_one(text: str) -> int:
    number = int(text) if text.isascii() and text.isdigit() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(
            f"The number is wrong. Received: {text!r}. Expected: a whole number of at least 1, for example 2."
        )
    return number


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(
            f"The number is wrong. Received: {text!r}. Expected: seconds, a number of at least 0, for example 60."
        )
    return seconds
