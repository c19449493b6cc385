"""Searches the plans for a number of workers: those that make sense, without what does not fit, in order, and why."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from tfdist.planning.cost_terms import Conditions, Prediction, measured_compilations
from tfdist.planning.group_exchanges import exchange_of
from tfdist.planning.measurements import DENSE, Measurements
from tfdist.planning.plan_table import code_of
from tfdist.planning.plans import Plan, PlannedStrategy, planned_object
from tfdist.planning.predict_data_parallel import (
    DataParallel,
    LocalTraining,
    ParameterServers,
    predict_data_parallel,
    predict_local_updates,
    predict_parameter_servers,
)
from tfdist.planning.predict_model_parallel import ModelParallel, bubble, predict_model_parallel, stage_layers
from tfdist.utils.formatting import format_bytes, format_seconds

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


TIE = 0.05
"""Plans whose predicted times differ by less are equally good: two runs of one benchmark differ by as much."""


class FoundPlans(NamedTuple):
    """The plans for a number of workers."""

    plans: list[Plan]  # those that fit, best first
    too_large: list[tuple[Plan, int]]  # those that do not, with the missing bytes; the smallest excess first


def find_plans(measured: Measurements, conditions: Conditions, workers: int) -> FoundPlans:
    """Returns all sensible plans: none if there are more devices than samples in a batch.

    They are ordered by samples in a second. Parameter servers and stages, whose chief's own time is not measured,
    follow all others. Among plans within 5 % of the fastest one that is left, the simplest is first: exact before
    inexact, fewer options before more, then the smaller error of a gradient.
    """
    fitting: dict[bool, list[Candidate]] = {False: [], True: []}  # by whether there is a chief
    excess: list[tuple[Candidate, float]] = []
    dense_bytes = 0.0
    for candidate in candidates(measured, conditions, workers):
        if candidate.prediction.memory_bytes <= conditions.memory_bytes:
            fitting[candidate.has_chief].append(candidate)
        else:
            excess.append((candidate, candidate.prediction.memory_bytes - conditions.memory_bytes))
        if candidate.method == DENSE and candidate.complexity == 0:
            dense_bytes = max(dense_bytes, candidate.prediction.wire_bytes)
    excess.sort(key=lambda pair: (pair[1], _complexity(measured, pair[0])))
    ordered = [*_by_speed(measured, fitting[False]), *_by_speed(measured, fitting[True])]
    return FoundPlans(
        [_plan(measured, candidate, dense_bytes) for candidate in ordered],
        [(_plan(measured, candidate, dense_bytes), int(missing)) for candidate, missing in excess],
    )


def _by_speed(measured: Measurements, unordered: Sequence[Candidate]) -> list[Candidate]:
    remaining = sorted(
        unordered, key=lambda candidate: (candidate.prediction.step_seconds, _complexity(measured, candidate))
    )
    result = []
    while remaining:
        limit = remaining[0].prediction.step_seconds * (1 + TIE)
        tied = [candidate for candidate in remaining if candidate.prediction.step_seconds <= limit]
        chosen = min(tied, key=lambda candidate: (_complexity(measured, candidate), candidate.prediction.step_seconds))
        result.append(chosen)
        remaining.remove(chosen)
    return result


def _complexity(measured: Measurements, candidate: Candidate) -> tuple[bool, bool, int, float]:
    return (
        candidate.is_local,
        candidate.method != DENSE,
        candidate.complexity,
        gradient_error(measured, candidate.method, candidate.workers),
    )


def _plan(measured: Measurements, candidate: Candidate, dense_bytes: float) -> Plan:
    predicted, program = candidate.prediction, measured.program
    # Without this line, "auto" may compile what was measured without.
    says_compiled = True in measured_compilations(program) and candidate.strategy.name == "MultiWorkerMirroredStrategy"
    return Plan(
        strategy=candidate.strategy,
        compression=None if candidate.method == DENSE else candidate.method,
        jit_compile=candidate.compiled,
        exact=candidate.method == DENSE and not candidate.is_local,
        workers=candidate.workers,
        parameter_servers=candidate.servers,
        has_chief=candidate.has_chief,
        step_seconds=predicted.step_seconds,
        samples_per_second=program.rows / predicted.step_seconds,
        memory_bytes=int(predicted.memory_bytes),
        wire_bytes=int(predicted.wire_bytes),
        accuracy=accuracy_of(measured, candidate),
        reason=reason_of(candidate, dense_bytes),
        code=code_of(
            candidate.strategy,
            jit_compile=candidate.compiled if says_compiled else None,
            accumulated=candidate.accumulated,
        ),
        gradient_accumulation_steps=candidate.accumulated,
    )


_BUSY = 0.6  # the part of a step from which something is what bounds it


def gradient_error(measured: Measurements, method: str, workers: int) -> float:
    """Returns by how much a first gradient of a method is off, as a part of the gradient."""
    return 0.0 if method == DENSE else exchange_of(measured.program, method, max(workers, 2)).gradient_error


def accuracy_of(measured: Measurements, candidate: Candidate) -> str:
    """Returns the price in exactness."""
    prices = []
    if candidate.method != DENSE:
        exchange = exchange_of(measured.program, candidate.method, max(candidate.workers, 2))
        prices.append(
            f"{_what_is_sent(candidate)} off by {100 * exchange.gradient_error:.2g} %"
            + (" at first; what is left out is added to the next ones" if exchange.state_bytes else "")
        )
    mode = candidate.strategy.arguments.get("mode")
    if candidate.accumulated > 1:
        prices.append(
            f"an update for {candidate.accumulated} batches, as if batches were {candidate.accumulated} times as large"
        )
    elif candidate.strategy.name == "ParameterServerStrategy" and candidate.is_local:
        prices.append(f"gradients are up to about {candidate.workers - 1} updates old, and each run differs")
    elif isinstance(mode, dict) and "sync_every" in mode["arguments"]:
        prices.append(f"workers train apart for {mode['arguments']['sync_every']} updates, on their own parts")
    return "; ".join(prices) or "exact: the numbers of one process, up to rounding"


def reason_of(candidate: Candidate, dense_bytes: float) -> str:
    """Returns what bounds the step, and what the plan does about it."""
    predicted = candidate.prediction
    step = predicted.step_seconds
    if candidate.workers == 1:
        return f"one worker computes {format_seconds(predicted.compute_seconds)} and sends nothing"
    if predicted.link_seconds > _BUSY * step:
        bound = f"the link is busy {_of(predicted.link_seconds, step)}"
    elif predicted.compute_seconds > _BUSY * step:
        bound = f"computation takes {_of(predicted.compute_seconds, step)}"
    elif predicted.exchange_seconds > max(predicted.compute_seconds, predicted.link_seconds):
        bound = f"encoding and copies take the cores {_of(predicted.exchange_seconds, step)}"
    else:
        bound = (
            f"of {format_seconds(step)} computation takes {format_seconds(predicted.compute_seconds)}, the exchange "
            f"{format_seconds(predicted.exchange_seconds)} of the cores and {format_seconds(predicted.link_seconds)} "
            "of the link; the rest are latencies"
        )
    means = _means(candidate, dense_bytes)
    return f"{bound}; {means}" if means else bound


def _means(candidate: Candidate, dense_bytes: float) -> str:
    """Returns what the plan changes."""
    arguments, predicted = candidate.strategy.arguments, candidate.prediction
    means = []
    if candidate.strategy.name == "ModelParallelStrategy":
        pipeline = arguments["pipeline"]["arguments"]
        stages, parts = pipeline["stages"], pipeline["micro_batches"]
        if stages > 1:
            means.append(f"stages wait {100 * bubble(stages, parts):.0f} % of it for others")
        if "layout_map" in arguments:
            means.append("layers are split, as far as auto_layout can")
    elif candidate.strategy.name == "ParameterServerStrategy":
        means.append(f"each worker pulls all weights, and sends {format_bytes(predicted.wire_bytes)}")
    if candidate.method != DENSE or candidate.is_local or "shard_optimizer_state" in arguments:
        if 0 < predicted.wire_bytes < dense_bytes:
            means.append(f"sends {_part(dense_bytes / predicted.wire_bytes)} of the dense gradients")
    if "shard_optimizer_state" in arguments:
        means.append(f"a worker holds 1/{candidate.workers} of the slots")
    if arguments.get("micro_batches", 1) > 1:
        means.append(f"activations of 1/{arguments['micro_batches']} of the rows at a time")
    if "bucket_bytes" in arguments:
        means.append("one message instead of one for each bucket")
    if "load_balancing" in arguments:
        means.append("rows follow the speeds of the workers")
    if candidate.compiled:
        means.append("XLA compiles the layers")
    return "; ".join(means)


def _what_is_sent(candidate: Candidate) -> str:
    is_difference = (
        candidate.is_local and candidate.strategy.name == "MultiWorkerMirroredStrategy" and candidate.accumulated == 1
    )
    return "differences of weights are" if is_difference else "gradients are"


def _of(part: float, step: float) -> str:
    return f"{format_seconds(min(part, step))} of {format_seconds(step)}"


def _part(ratio: float) -> str:
    return f"1/{ratio:.1f}" if ratio < 10 else f"1/{ratio:.0f}"
