"""The options of `tfdist plan --simulate`."""

import argparse
from pathlib import Path

from tfdist.planning.measurements import Measurements
from tfdist.planning.simulation import STRONG, WEAK, FailureCosts, FindPlans, SimulatedCluster, Simulation, simulate
from tfdist.planning.simulation_report import check_picture, draw
from tfdist.planning.topology import parse_topology
from tfdist.planning.units import duration_seconds, positive_seconds
from tfdist.utils.argument_checks import UsageError

_MOST_PARTS = 64  # the smallest batch that is measured has a 64th of the rows
_DEPENDENT = ("topology", "scaling", "sharded_files", "picture", "mtbf", "restart_time", "price_per_hour")


def add_simulation_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
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
        type=positive_seconds,
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
    """Checks the options, before anything is measured.

    Raises:
        UsageError: Options are missing, without effect, or a picture cannot be drawn.
    """
    given = [f"--{name.replace('_', '-')}" for name in _DEPENDENT if getattr(options, name) not in (None, False)]
    if not options.simulate:
        if given:
            raise UsageError(
                f"Options of a simulation without it. Received: {', '.join(given)}. Expected: --simulate, too. "
                "Add it, or remove them."
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
    few = {1, 4} if options.scaling != STRONG else {1, 4, min(max(options.workers), _MOST_PARTS)}
    return tuple(sorted(few))


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
