"""Measures a program and a network, and shows the fastest ways to train it."""

import argparse
import dataclasses
import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from tfdist import cluster
from tfdist.cluster import ClusterConfig
from tfdist.launch.cli.plan_command import check_simulation_options, probed_workers, simulated
from tfdist.planning.cost_terms import Conditions, on_shared_cores
from tfdist.planning.link_costs import LinkSpeed
from tfdist.planning.measurements import DENSE, Measurements
from tfdist.planning.plan_table import plan_name, to_lines
from tfdist.planning.plans import Plan, PlanFile
from tfdist.planning.search import find_plans
from tfdist.planning.simulation_report import simulation_text
from tfdist.probe.run_probe import ProbeError
from tfdist.utils import atomic_files
from tfdist.utils.argument_checks import UsageError
from tfdist.utils.cores_and_ports import usable_cores
from tfdist.utils.formatting import counted, format_bytes

METHODS = ("int8", "powersgd:4", "bf16", "int4", "topk:0.01", "powersgd:1", "sign", "randomk:0.01", "fp8", "fp16")
"""The methods that are measured with `--allow-compression`, the most useful ones first."""

_FAILURE_EXIT_CODE = 1
_SHOWN = 10
# No limit: what transfers between two processes of one machine cost is in their measured seconds.
_LOOPBACK = LinkSpeed(bytes_per_second=1e12)
_TIMEOUT_OF_PEERS = 60.0


def measure_and_plan(options: argparse.Namespace, measure: Callable[..., Measurements]) -> int:
    """Measures the program, prints the plans, and returns the exit code; see `plan_command.execute`."""
    script = options.script[1:] if options.script[:1] == ["--"] else options.script
    _check(options, script)
    earlier = _earlier(options.probe) if options.probe else None
    network = _network_of(options)
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
    link = network.link or _LOOPBACK
    plans: list[Plan] = []
    too_large: list[tuple[Plan, int]] = []
    for workers in network.workers:
        if workers * options.devices > measured.program.rows:
            _say(
                f"{counted(workers, 'worker')}: left out, as batches have {counted(measured.program.rows, 'sample')}. "
                "Use larger batches."
            )
            continue
        conditions = _conditions_of(options, measured, link, workers, shares_memory=network.link is None)
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
        return find_plans(program, _conditions_of(options, program, link, workers, shares_memory=False), workers).plans

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


@dataclasses.dataclass(frozen=True)
class _PlannedNetwork:
    """Where the workers are, and what each of them has."""

    workers: tuple[int, ...]  # their numbers
    link: LinkSpeed | None  # the connection of each; None: they are on this machine, and share its cores and its memory
    cores: int  # cores of each
    cluster: str = ""  # what describes the cluster whose tasks they are: "Slurm", for example; empty: none


def _network_of(options: argparse.Namespace) -> _PlannedNetwork | None:
    """Returns where the workers are, or None in a task of a cluster that does not plan; measures a cluster's links."""
    cores = usable_cores()
    if options.simulate:
        return _PlannedNetwork(options.workers, options.topology.port, options.cores_per_worker or cores)
    try:
        config = cluster.detect()
    except ValueError as error:
        raise UsageError(f"{error} Or unset it, and describe the network by --link.") from error
    if config is not None and options.link is None and len(config.cluster.workers) > 1:
        from tfdist.doctor.check_context import workers_on_own_host

        link = measured_link(config, os.environ, cores, _TIMEOUT_OF_PEERS, _say)
        if link is None:
            return None
        cores_per_worker = options.cores_per_worker or max(cores // workers_on_own_host(config), 1)
        return _PlannedNetwork(options.workers or (len(config.cluster.workers),), link, cores_per_worker, config.source)
    if options.link is not None:
        return _PlannedNetwork(
            options.workers or (len(options.speeds) or 2,), options.link, options.cores_per_worker or cores
        )
    workers = options.workers or tuple(sorted({1, cores}))
    return _PlannedNetwork(workers, None, options.cores_per_worker or max(cores // max(workers), 1))


def _conditions_of(
    options: argparse.Namespace, measured: Measurements, link: LinkSpeed, workers: int, *, shares_memory: bool
) -> Conditions:
    machine_memory_bytes = measured.machine.memory_bytes
    if options.memory is None and not machine_memory_bytes:
        raise UsageError(
            "The memory of this machine is not known. Received: no --memory, on a system without /proc/meminfo. "
            "Expected: the memory of a worker, for example --memory 16GiB."
        )
    return Conditions(
        link,
        options.memory or (machine_memory_bytes // workers if shares_memory else machine_memory_bytes),
        cores=measured.machine.cores_per_worker,
        devices=options.devices,
        allow_compression=options.allow_compression,
        allow_local_updates=options.allow_local_updates,
        speeds=options.speeds if len(options.speeds) == workers else (),
    )


def measured_link(
    config: ClusterConfig, environ: Mapping[str, str], cores: int, timeout_seconds: float, say: Callable[[str], None]
) -> LinkSpeed | None:
    """Measures all links with the other tasks; returns the slowest, or None where another task plans.

    Exchanges wait for the slowest link, so its bandwidth is the smallest of both directions of all links, and its
    latency half of the longest round trip, also of links of which nothing else was measured.
    """
    # Imported late: other commands do not need them.
    from tfdist.doctor.check_context import CheckContext
    from tfdist.doctor.check_runner import run_checks
    from tfdist.doctor.link_measurement import slowest_link
    from tfdist.doctor.member_task import ReportSummary

    context = CheckContext(environ, cores, config)
    result = run_checks(context, timeout_seconds=timeout_seconds, say=say, checks=())
    if isinstance(result, ReportSummary):
        return None
    link = slowest_link(result.links)
    errors = [finding.found for finding in result.findings if finding.level == "error"]
    if errors or link is None:
        raise UsageError(
            f"The links between the tasks cannot be measured. Received: {'; '.join(errors) or 'no measured link'}. "
            "Expected: tfdist plan runs as every task of the cluster at the same time. Start it as each of them "
            "(tfdist doctor finds what is wrong), or give --link without a cluster."
        )
    return dataclasses.replace(link, latency_seconds=max(measured.round_trip_seconds for measured in result.links) / 2)
