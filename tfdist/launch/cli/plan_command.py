"""`tfdist plan`: the sub-command and its help."""

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from tfdist.launch.cli.plan_options import add_options

if TYPE_CHECKING:
    from tfdist.planning.measurements import Measurements

_DESCRIPTION = """\
Find the fastest way to train a program: which strategy, with which compression and options.

The program runs as one process up to its first fit, which is measured for a few steps. Its callbacks do not run, and
nothing is written. Then the time of a step, samples/s, memory, bytes and the price in exactness are predicted for every
strategy. Those that fit into memory are shown, the best first, with the lines of code that give them.

In a cluster (TF_CONFIG, srun, Kubernetes) start the command as every task: the links between them are measured, and the
first task measures the program and shows the plans. Otherwise --link describes the network; without it the workers are
on this machine."""

_EPILOG = """\
examples:
  tfdist plan train.py
  tfdist plan --workers 2,8,64 --link 1gbit,0.1ms --json plan.json train.py --epochs 3
  tfdist plan --workers 8 --link 10gbit --memory 16GiB --allow-compression train.py
  tfdist plan --probe plan.json --workers 16 --link 100mbit,5ms --allow-compression --allow-local-updates
  tfdist plan --simulate --workers 2..4096 --topology rack:8x8,10gbit/1gbit --mtbf 30d train.py
  srun --nodes 4 --ntasks-per-node 1 tfdist plan --json plan.json train.py

Exit code: 0; 1 if the program cannot be measured, or no plan fits into memory; 2 for a usage error. All arguments after
the script are passed to it."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the sub-command `plan`."""
    parser = commands.add_parser(
        "plan",
        help="find the fastest strategy for a program",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_options(parser)
    parser.set_defaults(execute=execute)


def execute(options: argparse.Namespace, measure: "Callable[..., Measurements] | None" = None) -> int:
    """Measures, prints the plans, and returns the exit code.

    Args:
        options: The parsed options.
        measure: Measures the program, by default `tfdist.probe.run_probe.measure`.

    Raises:
        UsageError: The command or the environment is invalid. Nothing was measured or written then.
    """
    # Imported late: other commands do not need them.
    from tfdist.launch.cli.plan_execution import measure_and_plan
    from tfdist.probe.run_probe import measure as measure_program

    return measure_and_plan(options, measure or measure_program)
