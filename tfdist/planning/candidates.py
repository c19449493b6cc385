"""The plans that make sense for a number of workers, each with its prediction."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from tfdist.planning.cost_terms import Conditions, Prediction, measured_compilations
from tfdist.planning.measurements import DENSE, Measurements
from tfdist.planning.plans import PlannedStrategy, planned_object
from tfdist.planning.predict_data_parallel import (
    DataParallel,
    LocalTraining,
    ParameterServers,
    predict_data_parallel,
    predict_local_updates,
    predict_parameter_servers,
)
from tfdist.planning.predict_model_parallel import ModelParallel, predict_model_parallel, stage_layers

_MICRO_BATCHES = (2, 4, 8)
_PIPELINE_MICRO_BATCHES = (4, 8, 16, 32)
_ACCUMULATED = (4,)
_WAYS = (1, 2, 4)
_MULTI_WORKER = "MultiWorkerMirroredStrategy"
# The defaults of the classes, and what `docs/local_updates.md` measures.
_LOCAL_TRAININGS = (
    LocalTraining(20),
    LocalTraining(50, has_outer_optimizer=True),
    LocalTraining(50, has_outer_optimizer=True, fragments=4, overlap_steps=10),
    LocalTraining(100, has_outer_optimizer=True, fragments=4, overlap_steps=20),
)
_LEAST_EXCHANGES = 2  # in an epoch, which should be several times `sync_every` long


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A plan before it is written out."""

    strategy: PlannedStrategy  # the class and its arguments
    method: str  # the compression, or `DENSE`
    prediction: Prediction  # what is predicted
    workers: int
    compiled: bool = False  # whether XLA compiles steps
    accumulated: int = 1  # the number of batches of an update
    servers: int = 0  # the number of parameter servers
    has_chief: bool = False  # whether a chief drives the workers
    is_local: bool = False  # whether updates use other weights or batches than those of the program
    complexity: int = 0  # how much a user has to know: 0 for data parallel training as it is


def candidates(measured: Measurements, conditions: Conditions, workers: int) -> Iterator[Candidate]:
    """Yields all plans that make sense, also those that do not fit into memory."""
    if measured.program.rows < workers * conditions.devices:
        return  # some of them would compute nothing
    yield from _data_parallel(measured, conditions, workers)
    if workers > 1:
        yield from _parameter_servers(measured, conditions, workers)
        if conditions.allow_local_updates:
            yield from _local_updates(measured, conditions, workers)
        if measured.program.is_functional and measured.program.layers:
            yield from _model_parallel(measured, conditions, workers * conditions.devices)


def methods(measured: Measurements, conditions: Conditions) -> list[str]:
    """Returns the measured methods that the user allows, `DENSE` first."""
    measured_methods = (
        [exchange.method for exchange in measured.program.exchanges] if conditions.allow_compression else []
    )
    return list(dict.fromkeys([DENSE, *measured_methods]))


def _data_parallel(measured: Measurements, conditions: Conditions, workers: int) -> Iterator[Candidate]:
    program = measured.program
    for compiled in measured_compilations(program):
        for method in methods(measured, conditions) if workers > 1 else [DENSE]:
            plain = DataParallel(method, compiled)
            variants: list[tuple[DataParallel, dict[str, Any], int]] = [(plain, {}, 0)]
            variants += [
                (dataclasses.replace(plain, micro_batches=parts), {"micro_batches": parts}, 1)
                for parts in _MICRO_BATCHES
                if program.rows >= parts * workers * conditions.devices
            ]
            if workers > 1:
                variants.append((dataclasses.replace(plain, one_bucket=True), {"bucket_bytes": 0}, 1))
                if program.slot_bytes and method.partition(":")[0] not in ("powersgd", "randomk", "topk"):
                    sharded = dataclasses.replace(plain, shard_state=True)
                    variants.append((sharded, {"shard_optimizer_state": True}, 2))
                if len(set(conditions.speeds)) > 1:
                    balanced = dataclasses.replace(plain, is_balanced=True)
                    variants.append((balanced, {"load_balancing": True}, 2))
                if conditions.allow_local_updates:
                    variants += [(dataclasses.replace(plain, accumulated=count), {}, 3) for count in _ACCUMULATED]
            best = predict_data_parallel(measured, conditions, workers, plain)
            for options, arguments, complexity in variants:
                predicted = predict_data_parallel(measured, conditions, workers, options)
                saves = options.shard_state or best.memory_bytes > conditions.memory_bytes
                is_smaller = saves and predicted.memory_bytes < best.memory_bytes
                if options == plain or predicted.step_seconds < best.step_seconds or is_smaller:
                    yield Candidate(
                        PlannedStrategy(_MULTI_WORKER, _compressed(method) | arguments),
                        method,
                        predicted,
                        workers,
                        compiled,
                        accumulated=options.accumulated,
                        is_local=options.accumulated > 1,
                        complexity=complexity + compiled,
                    )


def _local_updates(measured: Measurements, conditions: Conditions, workers: int) -> Iterator[Candidate]:
    program = measured.program
    steps = program.samples // program.rows if program.samples else None
    for training in _LOCAL_TRAININGS:
        if steps is not None and steps < _LEAST_EXCHANGES * training.sync_every:
            continue
        arguments = {"sync_every": training.sync_every}
        if training.overlap_steps:
            arguments |= {"fragments": training.fragments, "overlap_steps": training.overlap_steps}
        mode = planned_object("DiLoCo" if training.has_outer_optimizer else "LocalSGD", **arguments)
        for compiled in measured_compilations(program):
            for method in methods(measured, conditions):
                options = dataclasses.replace(training, method=method, compiled=compiled)
                yield Candidate(
                    PlannedStrategy(_MULTI_WORKER, _compressed(method) | {"mode": mode}),
                    method,
                    predict_local_updates(measured, conditions, workers, options),
                    workers,
                    compiled,
                    is_local=True,
                    complexity=4 + compiled + bool(training.overlap_steps),
                )


def _parameter_servers(measured: Measurements, conditions: Conditions, workers: int) -> Iterator[Candidate]:
    for servers in dict.fromkeys((max(workers // 4, 1), workers)):
        for asynchronous in (False, True)[: 1 + conditions.allow_local_updates]:
            mode = planned_object("Asynchronous" if asynchronous else "Synchronous")
            for method in methods(measured, conditions):
                options = ParameterServers(servers, asynchronous, method)
                yield Candidate(
                    PlannedStrategy("ParameterServerStrategy", {"mode": mode} | _compressed(method)),
                    method,
                    predict_parameter_servers(measured, conditions, workers, options),
                    workers,
                    servers=servers,
                    has_chief=True,
                    is_local=asynchronous,
                    complexity=6 + asynchronous,
                )


def _model_parallel(measured: Measurements, conditions: Conditions, devices: int) -> Iterator[Candidate]:
    program = measured.program
    for ways in _WAYS:
        for stages in range(1, devices // ways + 1):
            columns, unused_devices = divmod(devices, ways * stages)
            if unused_devices or stages * ways == 1 or stages > len(program.layers):
                continue
            for method in methods(measured, conditions) if columns > 1 else [DENSE]:
                options = _best_micro_batches(measured, conditions, ModelParallel(stages, columns, ways, method=method))
                if options is None:
                    continue
                pipeline = planned_object("Pipeline", stages=stages, micro_batches=options.micro_batches)
                if cuts := _cuts(measured, stages):
                    pipeline["arguments"]["cuts"] = cuts
                arguments: dict[str, Any] = {"pipeline": pipeline} | _compressed(method)
                if columns > 1:
                    arguments["data_parallel"] = columns
                if ways > 1:
                    arguments["layout_map"] = planned_object("auto_layout", ways=ways)
                yield Candidate(
                    PlannedStrategy("ModelParallelStrategy", arguments),
                    method,
                    predict_model_parallel(measured, conditions, options),
                    devices // conditions.devices,
                    has_chief=True,
                    complexity=7 + (columns > 1) + 2 * (ways > 1),
                )


def _best_micro_batches(measured: Measurements, conditions: Conditions, options: ModelParallel) -> ModelParallel | None:
    """Returns the options with the fastest number of micro-batches that fits, else with that of the least memory."""
    rows = measured.program.rows / options.columns
    counts = [1] if options.stages == 1 else [count for count in _PIPELINE_MICRO_BATCHES if count <= rows]
    variants = [dataclasses.replace(options, micro_batches=count) for count in counts]
    if not variants or rows < 1:
        return None
    predicted = [(predict_model_parallel(measured, conditions, variant), variant) for variant in variants]
    fitting = [pair for pair in predicted if pair[0].memory_bytes <= conditions.memory_bytes]
    if not fitting:
        return min(predicted, key=lambda pair: pair[0].memory_bytes)[1]
    return min(fitting, key=lambda pair: pair[0].step_seconds)[1]


def _cuts(measured: Measurements, stages: int) -> list[str]:
    layers = measured.program.layers
    is_unique = len({layer.name for layer in layers}) == len(layers)
    return [stage[0].name for stage in stage_layers(layers, stages)[1:]] if is_unique else []


def _compressed(method: str) -> dict[str, Any]:
    return {} if method == DENSE else {"compression": method}
