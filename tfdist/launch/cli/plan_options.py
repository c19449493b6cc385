"""The options of `tfdist plan`."""

import argparse
import math
import re
from pathlib import Path

from tfdist.launch.cli.simulation_options import add_simulation_options
from tfdist.planning.link_costs import Link
from tfdist.planning.units import bits_per_second, duration_seconds, worker_numbers
from tfdist.utils.argument_checks import seconds, whole_number

_BYTES = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)([a-z]+)")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the sub-command `plan`."""
    parser.add_argument(
        "--workers",
        type=worker_numbers,
        metavar="N[,N...]",
        help="numbers of workers to plan for: a list, or a range such as 2..64 (default: those of the cluster; with "
        "--link 2; else 1 and as many as this machine has cores)",
    )
    parser.add_argument(
        "--link",
        type=link,
        metavar="RATE[,LATENCY]",
        help="the Ethernet link of each worker: its nominal rate in kbit, mbit or gbit a second, and the delay of one "
        "direction in us, ms or s, for example 1gbit,0.1ms (default: all workers on this machine)",
    )
    parser.add_argument(
        "--devices",
        type=whole_number(at_least=1, example=4),
        default=1,
        metavar="N",
        help="devices of each worker, each as fast as the measured one (default: 1)",
    )
    parser.add_argument(
        "--memory",
        type=memory_bytes,
        metavar="SIZE",
        help="memory of each worker, for example 16GiB (default: what is free here; workers on one machine share it)",
    )
    parser.add_argument(
        "--cores-per-worker",
        type=whole_number(at_least=1, example=2),
        metavar="C",
        help="cores of each worker, on which the program is measured (default: all of this machine; workers on one "
        "machine share them)",
    )
    parser.add_argument(
        "--speeds",
        type=relative_speeds,
        default=(),
        metavar="S,S[,S...]",
        help="speeds of the workers by rank, in any unit, if they differ; the first is this machine's (default: equal)",
    )
    parser.add_argument(
        "--allow-compression",
        action="store_true",
        help="also show plans that round gradients or leave parts of them out",
    )
    parser.add_argument(
        "--allow-local-updates",
        action="store_true",
        help="also show plans whose updates differ from the program's: LocalSGD, DiLoCo, asynchronous parameter "
        "servers, accumulation over several batches",
    )
    parser.add_argument(
        "--no-xla", action="store_true", help="do not measure steps that XLA compiles, which takes time"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write all plans and measurements to FILE, for tfdist run --plan FILE"
    )
    parser.add_argument(
        "--probe", type=Path, metavar="FILE", help="use the measurements of an earlier --json FILE; no script is run"
    )
    parser.add_argument(
        "--timeout",
        type=seconds(may_be_zero=False, example=60),
        default=60.0,
        metavar="S",
        help="limit of the measurements in seconds (default: 60)",
    )
    add_simulation_options(parser)
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="script ...", help="the program, and its arguments")


def link(text: str) -> Link:
    """Parses `--link`: what TCP has of an Ethernet link.

    >>> found = link("1gbit,0.1ms")
    >>> round(8 * found.bytes_per_second / 1e6), found.latency_seconds
    (941, 0.0001)

    Raises:
        argparse.ArgumentTypeError: A part is invalid, or the rate is 0.
    """
    rate, _, latency = text.partition(",")
    return Link.ethernet(bits_per_second(rate.strip()), duration_seconds(latency.strip()) if latency else 0.0)


def relative_speeds(text: str) -> tuple[float, ...]:
    """Parses `--speeds`.

    >>> relative_speeds("1,1,0.5")
    (1.0, 1.0, 0.5)

    Raises:
        argparse.ArgumentTypeError: A speed is not a number above 0.
    """
    try:
        speeds = tuple(map(float, text.split(",")))
    except ValueError:
        speeds = ()
    if not speeds or not all(0 < speed < math.inf for speed in speeds):
        raise argparse.ArgumentTypeError(
            f"Invalid speeds of workers. Received: {text!r}. Expected: a number above 0 for each worker, for example "
            "1,1,0.5."
        )
    return speeds


def memory_bytes(text: str) -> int:
    """Parses `--memory`.

    >>> memory_bytes("16GiB"), memory_bytes("1.5GB")
    (17179869184, 1500000000)
    >>> memory_bytes("0GB")
    Traceback (most recent call last):
        ...
    argparse.ArgumentTypeError: Invalid size of a memory. Received: '0GB'. Expected: a number above 0 and a unit of kB,
    MB, GB, KiB, MiB, GiB, for example 16GiB.

    Raises:
        argparse.ArgumentTypeError: It is invalid.
    """
    match = _MEMORY.fullmatch(text.strip().lower())
    size = int(float(match[1]) * _BYTES.get(match[2], 0)) if match else 0
    if size < 1:
        raise argparse.ArgumentTypeError(
            f"Invalid size of a memory. Received: {text!r}. Expected: a number above 0 and a unit of kB, MB, GB, KiB, "
            "MiB, GiB, for example 16GiB."
        )
    return size
