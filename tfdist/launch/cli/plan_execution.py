"""Measures a program and a network, and shows the fastest ways to train it."""

import argparse
import dataclasses
import json
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from tfdist.launch.cli.plan_command import check_simulation_options, probed_workers, simulated
from tfdist.launch.cli.plan_network import LOOPBACK, conditions_of, network_of
from tfdist.planning.cost_terms import on_shared_cores
from tfdist.planning.link_costs import LinkSpeed
from tfdist.planning.measurements import DENSE, Measurements
from tfdist.planning.plan_table import plan_name, to_lines
from tfdist.planning.plans import Plan, PlanFile
from tfdist.planning.search import find_plans
from tfdist.planning.simulation_report import simulation_text
from tfdist.probe.run_probe import ProbeError
from tfdist.utils import atomic_files
from tfdist.utils.argument_checks import UsageError
from tfdist.utils.formatting import counted, format_bytes

METHODS = ("int8", "powersgd:4", "bf16", "int4", "topk:0.01", "powersgd:1", "sign", "randomk:0.01", "fp8", "fp16")
"""The methods that are measured with `--allow-compression`, the most useful ones first."""

_FAILURE_EXIT_CODE = 1
_SHOWN = 10


def measure_and_plan(options: argparse.Namespace, measure: Callable[..., Measurements]) -> int:
    """Measures the program, prints the plans, and returns the exit code.

    Raises:
        UsageError: The command or the environment is invalid. Nothing was measured or written then.
    """
    script = options.script[1:] if options.script[:1] == ["--"] else options.script
    _check(options, script)
    earlier = _earlier(options.probe) if options.probe else None
    network = network_of(options, os.environ, _say)
    if network is None:
        _say("the first task of the cluster shows the plans")
        return 0
    try:
        measured = earlier or measure(
            script,
            workers=probed_workers(options) if options.simulate else network.workers,
            methods=METHODS if options.allow_compression else (),
            with_xla=not options.no_xla,
            timeout_seconds=options.timeout,
            cores_per_worker=network.cores,
        )
    except ProbeError as error:
        _say(str(error))
        return _FAILURE_EXIT_CODE
    measured_methods = {exchange.method for exchange in measured.program.exchanges}
    if options.allow_compression and measured_methods == {DENSE}:
        _say("the measurements have no compression methods: measure the program with --allow-compression")
    elif options.allow_compression and not measured_methods.issuperset(METHODS):
        missing = ", ".join(method for method in METHODS if method not in measured_methods)
        _say(f"The time was too short for all measurements. These methods are not planned: {missing}. Raise --timeout.")
    if not options.no_xla and not any(step.compiled for step in measured.program.steps):
        _say(
            "Steps that XLA compiles are not planned: the time was too short, or XLA cannot compile the model. Raise "
            "--timeout, or give --no-xla."
        )
    if options.simulate:
        return _simulate(options, measured)
    link = network.link or LOOPBACK
    plans: list[Plan] = []
    too_large: list[tuple[Plan, int]] = []
    for workers in network.workers:
        if workers * options.devices > measured.program.rows:
            _say(
                f"{counted(workers, 'worker')}: left out, as batches have {counted(measured.program.rows, 'sample')}. "
                "Use larger batches."
            )
            continue
        conditions = conditions_of(options, measured, link, workers, shares_memory=network.link is None)
        search_result = find_plans(
            measured if network.link else on_shared_cores(measured, workers), conditions, workers
        )
        shown = _SHOWN if len(network.workers) == 1 else max(_SHOWN // len(network.workers), 3)
        lines = to_lines(
            search_result.plans,
            search_result.too_large,
            rows=measured.program.rows,
            link=network.link,
            memory_bytes=conditions.memory_bytes,
            shown=shown,
            script=shlex.join(script) if script else "train.py",
            cluster=network.cluster,
        )
        print("\n".join(["", *lines] if plans or too_large else lines))
        plans += search_result.plans
        too_large += search_result.too_large
    _write(options, PlanFile(plans, too_large, measured.to_json(), dataclasses.asdict(link)))
    if too_large and not plans:
        _say(_nothing_fits(too_large))
    return 0 if plans else _FAILURE_EXIT_CODE


def _simulate(options: argparse.Namespace, measured: Measurements) -> int:
    def plans_of(program: Measurements, link: LinkSpeed, workers: int) -> list[Plan]:
        return find_plans(program, conditions_of(options, program, link, workers, shares_memory=False), workers).plans

    simulation = simulated(options, measured, plans_of)
    print(simulation_text(simulation))
    # Without plans: `tfdist run --plan` must not start thousands of workers, and steps of other batches are no plans.
    link = dataclasses.asdict(options.topology.port)
    _write(options, PlanFile([], [], measured.to_json(), link, simulation.to_json()))
    return 0 if simulation.points else _FAILURE_EXIT_CODE


def _write(options: argparse.Namespace, file: PlanFile) -> None:
    if options.json:
        atomic_files.write(options.json, (json.dumps(file.to_json(), indent=1) + "\n").encode())


def _check(options: argparse.Namespace, script: list[str]) -> None:
    check_simulation_options(options)
    if options.speeds and options.workers and len(options.speeds) not in options.workers:
        raise UsageError(
            f"The speeds are those of another number of workers. Received: --speeds of {len(options.speeds)} with "
            f"--workers {','.join(map(str, options.workers))}. Expected: a speed for each worker. Correct one of them."
        )
    if bool(script) == bool(options.probe):
        raise UsageError(
            "Either a program is measured, or earlier measurements are used. Received: "
            f"{' '.join(script) or 'no script'} and {f'--probe {options.probe}' if options.probe else 'no --probe'}. "
            "Expected: tfdist plan [options] script.py [arguments], or --probe FILE without a script."
        )
    if options.probe and options.cores_per_worker:
        raise UsageError(
            "The cores of a worker are those of the measurements. Received: --cores-per-worker with --probe. Expected: "
            "one of them. Measure the program again, without --probe."
        )
    if script and not os.path.isfile(script[0]):
        raise UsageError(
            f"The script is not a file. Received: {script[0]!r}. Expected: the path of a Python file that calls `fit`. "
            "Options of tfdist plan come before it."
        )
    if options.json and (not options.json.parent.is_dir() or options.json.is_dir()):
        raise UsageError(
            f"The plan cannot be written there. Received: --json {options.json}. Expected: a file in an existing "
            "directory. Create the directory, or correct the path."
        )


def _earlier(path: Path) -> Measurements:
    try:
        document = PlanFile.read(path).measurements
    except ValueError as error:
        raise UsageError(str(error)) from error
    try:
        return Measurements.from_json(document)
    except (KeyError, TypeError) as error:
        raise UsageError(
            f"The plan has no measurements that this version can use. Received: {path} ({error!r}). Expected: a file "
            "of `tfdist plan --json FILE train.py` of this version. Measure the program again, without --probe."
        ) from error


def _nothing_fits(too_large: list[tuple[Plan, int]]) -> str:
    plan, missing = min(too_large, key=lambda pair: pair[1])
    return (
        f"No plan fits into the memory of a worker. Received: {format_bytes(plan.memory_bytes - missing)}; "
        f"{plan_name(plan)} on {counted(plan.workers, 'worker')} comes nearest and needs {format_bytes(missing)} more. "
        "Expected: workers with more memory (--memory), more workers (--workers), which hold smaller parts, or a "
        "smaller model or batch."
    )


def _say(text: str) -> None:
    print(f"tfdist plan: {text}", file=sys.stderr, flush=True)
