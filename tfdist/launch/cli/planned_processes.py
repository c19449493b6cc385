"""`tfdist run --plan`: the processes of a run are those of the best plan of a file."""

import argparse
from pathlib import Path

from tfdist.planning.plans import PLAN_VARIABLE, PlanFile, Processes, best_plan, describe_processes
from tfdist.utils.argument_checks import UsageError


def add_plan_option(parser: argparse.ArgumentParser) -> None:
    """Adds the option to the parser of `tfdist run`."""
    parser.add_argument(
        "--plan",
        type=Path,
        metavar="FILE",
        help="a file of tfdist plan --json: start the workers, parameter servers and chief of its best plan, with "
        "--workers of the best one for that number; tfdist.strategies.planned() in the script creates the strategy",
    )


def apply_plan(options: argparse.Namespace) -> dict[str, str]:
    """Sets the options `workers`, `parameter_servers` and `chief` by the plan, if there is one.

    Returns:
        Variables for the environment of the processes.

    Raises:
        UsageError: There is neither a plan nor a number of workers; the file cannot be read or has no fitting plan; or
            other options contradict the plan.
    """
    if options.plan is None:
        if options.workers is None:
            raise UsageError(
                "The number of workers is missing. Received: neither --workers nor --plan. Expected: tfdist run "
                "--workers N script.py. Add --workers, or --plan with a file of tfdist plan --json."
            )
        return {}
    _check_roles_are_not_given(options)
    try:
        file = PlanFile.read(options.plan)
    except ValueError as error:
        raise UsageError(str(error)) from error
    # Workers are counted by host in the command, and all together in the plan. Plans with servers are for one host.
    nodes = options.nodes
    plan = best_plan(
        file, workers=None if options.workers is None else nodes * options.workers, with_servers=nodes == 1
    )
    if plan is None:
        hosts = "" if nodes == 1 else f" --nodes {nodes}"
        given = "" if options.workers is None else f" --workers {options.workers}"
        raise UsageError(
            f"The plan has nothing for this number of workers. Received: --plan {options.plan}{given}{hosts}, and "
            f"plans for {describe_processes(file)}. Expected: a number of workers of one of them"
            f"{', all hosts together and without parameter servers' if hosts else ''}. Change --workers, or write a "
            "plan for this number: tfdist plan --workers N --json FILE script.py."
        )
    if plan.workers % nodes:
        raise UsageError(
            f"The workers of the best plan cannot be divided among the hosts. Received: --nodes {nodes} and "
            f"{Processes.of(plan)}. Expected: --workers N, the number on each host. Add --workers."
        )
    options.workers = plan.workers // nodes
    options.parameter_servers = plan.parameter_servers
    options.chief = Processes.of(plan).has_chief
    return {PLAN_VARIABLE: str(options.plan.resolve())}


def _check_roles_are_not_given(options: argparse.Namespace) -> None:
    given = [f"--parameter-servers {options.parameter_servers}"] * bool(options.parameter_servers)
    given += ["--chief"] * options.chief
    if given:
        raise UsageError(
            f"The plan chooses parameter servers and chief. Received: --plan {options.plan} {' '.join(given)}. "
            f"Expected: one of them. Remove {given[0].split()[0]} to train by the plan, or --plan and create the "
            "strategy by hand."
        )
