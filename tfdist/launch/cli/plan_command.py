"""`tfdist plan`: the sub-command, its help, and its options, also those of `--simulate`."""

import argparse
import math
import re
from collections.abc import Callable
from pathlib import Path

from tfdist.planning.measurements import Measurements
from tfdist.planning.simulation import STRONG, WEAK, FailureCosts, FindPlans, SimulatedCluster, Simulation, simulate
from tfdist.planning.simulation_report import check_picture, draw
from tfdist.planning.topology import duration_seconds, parse_link, parse_topology
from tfdist.utils.argument_checks import UsageError, seconds, whole_number

_BYTES = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)([a-z]+)")
_MOST_WORKERS = 2**20
_MOST_PARTS = 64  # the smallest batch that is measured has a 64th of the rows
_DEPENDENT = ("topology", "scaling", "sharded_files", "picture", "mtbf", "restart_time", "price_per_hour")

HELP = "find the fastest strategy for a program"
DESCRIPTION = """\
Find the fastest way to train a program: which strategy, with which compression and options.

The program runs as one process up to its first fit, which is measured for a few steps. Its callbacks do not run, and
nothing is written. Then the time of a step, samples/s, memory, bytes and the price in exactness are predicted for every
strategy. Those that fit into memory are shown, the best first, with the lines of code that give them.

In a cluster (TF_CONFIG, srun, Kubernetes) start the command as every task: the links between them are measured, and the
first task measures the program and shows the plans. Otherwise --link describes the network; without it the workers are
on this machine."""

EPILOG = """\
examples:
  tfdist plan train.py
  tfdist plan --workers 2,8,64 --link 1gbit,0.1ms --json plan.json train.py --epochs 3
  tfdist plan --workers 8 --link 10gbit --memory 16GiB --allow-compression train.py
  tfdist plan --probe plan.json --workers 16 --link 100mbit,5ms --allow-compression --allow-local-updates
  tfdist plan --simulate --workers 2..4096 --topology rack:8x8,10gbit/1gbit --mtbf 30d train.py
  srun --nodes 4 --ntasks-per-node 1 tfdist plan --json plan.json train.py

Exit code: 0; 1 if the program cannot be measured, or no plan fits into memory; 2 for a usage error. All arguments after
the script are passed to it."""


def execute(options: argparse.Namespace, measure: Callable[..., Measurements] | None = None) -> int:
    """Measures, prints the plans, and returns the exit code. After a UsageError nothing was measured or written."""
    # Imported late: other commands do not need them.
    from tfdist.launch.cli.plan_execution import measure_and_plan
    from tfdist.probe.run_probe import measure as measure_program

    return measure_and_plan(options, measure or measure_program)


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
        type=parse_link,
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
    _add_simulation_options(parser)
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="script ...", help="the program, and its arguments")


def worker_numbers(text: str) -> tuple[int, ...]:
    """Parses numbers of workers: a list, or a range, which stands for both ends and the powers of two between them.

    >>> worker_numbers("2,8,64"), worker_numbers("3..20")
    ((2, 8, 64), (3, 4, 8, 16, 20))
    """
    match = re.fullmatch(r"(\d{1,9})\.\.(\d{1,9})", text)
    if match:
        low, high = int(match[1]), int(match[2])
        powers = {2**power for power in range(high.bit_length()) if low <= 2**power <= high}
        numbers = sorted(powers | {low, high}) if low <= high else []
    elif re.fullmatch(r"\d{1,9}(,\d{1,9})*", text):
        numbers = sorted({int(part) for part in text.split(",")})
    else:
        numbers = []
    if not numbers or not 1 <= numbers[0] <= numbers[-1] <= _MOST_WORKERS:
        raise argparse.ArgumentTypeError(
            f"Invalid numbers of workers. Received: {text!r}. Expected: numbers from 1 to {_MOST_WORKERS}, separated "
            "by commas, or a range such as 2..4096, the larger number last."
        )
    return tuple(numbers)


def relative_speeds(text: str) -> tuple[float, ...]:
    """Parses `--speeds`.

    >>> relative_speeds("1,1,0.5")
    (1.0, 1.0, 0.5)
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
    """
    match = _MEMORY.fullmatch(text.strip().lower())
    size = int(float(match[1]) * _BYTES.get(match[2], 0)) if match else 0
    if size < 1:
        raise argparse.ArgumentTypeError(
            f"Invalid size of a memory. Received: {text!r}. Expected: a number above 0 and a unit of kB, MB, GB, KiB, "
            "MiB, GiB, for example 16GiB."
        )
    return size


def _add_simulation_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("simulation", "clusters that you do not have")
    group.add_argument(
        "--simulate",
        action="store_true",
        help="predict steps, efficiency, failures and price for the numbers of --workers, for example 2..4096, on "
        "--topology; of each kind of plans the fastest one",
    )
    group.add_argument(
        "--topology",
        type=parse_topology,
        metavar="T",
        help="the network: flat,RATE[,LATENCY], or rack:HOSTS[xRACKS],RATE[,LATENCY]/RATE[,LATENCY] with the link of a "
        "host and that of a rack, which its hosts share, for example rack:8x8,10gbit,0.05ms/1gbit,0.5ms",
    )
    group.add_argument(
        "--scaling",
        choices=(WEAK, STRONG),
        help="weak: each worker computes the program's batch, so the global batch grows with the workers; strong: they "
        "divide it (default: weak)",
    )
    group.add_argument(
        "--sharded-files",
        action="store_true",
        help="each worker reads only its files (AutoShardPolicy.FILE); by default all workers read all data",
    )
    group.add_argument("--picture", type=Path, metavar="FILE", help="draw the simulation as .svg, .png or .pdf")
    group.add_argument(
        "--mtbf",
        type=_positive_seconds,
        metavar="TIME",
        help="mean time between two failures of a host, for example 30d: adds the best time between two saves, and the "
        "goodput",
    )
    group.add_argument(
        "--restart-time",
        type=duration_seconds,
        metavar="TIME",
        help="from a failure to the next step, for example 2min (default: what the program took from "
        "its start to its first step)",
    )
    group.add_argument(
        "--price-per-hour",
        type=_price,
        metavar="P",
        help="price of a host for an hour, in any currency: adds that of a million samples and of an epoch",
    )


def check_simulation_options(options: argparse.Namespace) -> None:
    """Checks that no option is missing or without effect, before anything is measured (UsageError)."""
    dependent_options = [
        f"--{name.replace('_', '-')}" for name in _DEPENDENT if getattr(options, name) not in (None, False)
    ]
    if not options.simulate:
        if dependent_options:
            raise UsageError(
                f"Options of a simulation without it. Received: {', '.join(dependent_options)}. Expected: --simulate, "
                "too. Add it, or remove them."
            )
        return
    if options.topology is None:
        raise UsageError(
            "A simulation needs a network. Received: --simulate without --topology. Expected: for example --topology "
            "rack:8x8,10gbit/1gbit or flat,10gbit."
        )
    if options.workers is None:
        raise UsageError(
            "A simulation needs numbers of workers. Received: --simulate without --workers. Expected: for example "
            "--workers 2..4096."
        )
    if options.link is not None:
        raise UsageError(
            "The network of a simulation is its topology. Received: --simulate and --link. Expected: --topology alone. "
            "Remove --link."
        )
    if options.speeds:
        raise UsageError(
            "Simulated workers are as fast as the measured one. Received: --simulate and --speeds. Expected: one of "
            "them. Remove --speeds."
        )
    if options.restart_time is not None and options.mtbf is None:
        raise UsageError(
            "A restart needs failures. Received: --restart-time without --mtbf. Expected: both, for example --mtbf 30d."
        )
    if options.picture is not None:
        try:
            check_picture(options.picture)
        except ValueError as error:
            raise UsageError(str(error)) from error


def probed_workers(options: argparse.Namespace) -> tuple[int, ...]:
    """Returns the numbers of workers whose parts of a batch a probe measures: steps between them are interpolated.

    In weak scaling a worker computes the complete batch; in any case exchanges of more than two workers are measured.
    """
    worker_counts = {1, 4} if options.scaling != STRONG else {1, 4, min(max(options.workers), _MOST_PARTS)}
    return tuple(sorted(worker_counts))


def simulated(options: argparse.Namespace, measured: Measurements, find_plans: FindPlans) -> Simulation:
    """Returns the simulation that the options describe, and draws its picture, if any."""
    program = measured.program
    failures = None
    if options.mtbf is not None:
        restart = program.start_seconds if options.restart_time is None else options.restart_time
        failures = FailureCosts(options.mtbf, program.save_seconds, restart)
    cluster = SimulatedCluster(
        options.workers,
        options.topology,
        scaling=options.scaling or WEAK,
        files_are_sharded=options.sharded_files,
        failures=failures,
        price_per_hour=options.price_per_hour,
    )
    simulation = simulate(measured, cluster, find_plans)
    if options.picture is not None and simulation.points:
        draw(simulation, options.picture)
    return simulation


def _positive_seconds(text: str) -> float:
    """Parses a duration that is not 0."""
    seconds = duration_seconds(text)
    if seconds == 0:
        raise argparse.ArgumentTypeError(
            f"The duration is 0. Received: {text!r}. Expected: more than 0, for example 30d."
        )
    return seconds


def _price(text: str) -> float:
    try:
        price = float(text)
    except ValueError:
        price = -1.0
    if not 0 <= price < 1e9:
        raise argparse.ArgumentTypeError(
            f"Invalid price. Received: {text!r}. Expected: a number of at least 0, for example 1.5."
        )
    return price
