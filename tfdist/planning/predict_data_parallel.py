"""Steps of data parallel workers: they exchange gradients, or weights after many updates, or use parameter servers.

Sources: of local updates Stich 2019, "Local SGD converges fast and communicates little"; Douillard et al. 2023,
"DiLoCo"; 2025, "Streaming DiLoCo with overlapping communication". Of the bytes of servers
`docs/choosing_a_strategy.md`: those of N workers send and receive N times the model in a step.
"""

import dataclasses
import math
from collections.abc import Sequence

from tfdist.planning.cost_terms import (
    Conditions,
    Prediction,
    StepCost,
    addition_seconds,
    exchange_bytes,
    expected_slowest,
    replica_bytes,
    scaled,
    step_of,
)
from tfdist.planning.group_exchanges import (
    bucket_costs,
    by_bucket,
    exchange_of,
    exchanged_seconds,
    ready_parts,
    wait_seconds,
    wire_bytes,
)
from tfdist.planning.link_costs import TransferCosts
from tfdist.planning.measurements import DENSE, EXCHANGE, GATHER, SUM, Collective, ExchangeMeasurement, Measurements

# In each step of `fit` workers ask whether any of them has data (`docs/architecture.md`, "Local updates"), by a scalar.
_QUESTION = Collective(SUM, 4, 0)
# What else was not measured: the states of metrics, of at most some hundred bytes.
_METRICS = Collective(SUM, 256, 0)
# The messages of a round: the chief calls, the worker pulls, pushes and returns, the chief calls the servers, and they
# answer.
_MESSAGES_IN_TURN = 6


@dataclasses.dataclass(frozen=True)
class DataParallel:
    """The options of data parallel training."""

    method: str = DENSE  # the argument `compression=`, or `DENSE`
    compiled: bool = False  # whether XLA compiles the step
    shard_state: bool = False  # whether each worker holds `1 / N` of the slots
    micro_batches: int = 1  # the parts in which a worker computes its rows, one after another
    accumulated: int = 1  # the number of batches whose gradients are added up before they are exchanged
    one_bucket: bool = False  # whether all gradients are sent together, after backpropagation
    is_balanced: bool = False  # whether rows follow the speeds of the workers


def predict_data_parallel(
    measured: Measurements, conditions: Conditions, workers: int, options: DataParallel
) -> Prediction:
    """Returns what is predicted of a step.

    A worker computes `1 / N` of the rows of the global batch. Buckets are exchanged while backpropagation continues;
    then the worker updates its weights, and all wait for the slowest of them. A single core encodes no bucket before it
    has computed all gradients: in `benchmarks/results/network.json` steps with compression take the floor and all
    of the time of the link, those without compression less.
    """
    program = measured.program
    parts = conditions.devices * options.micro_batches
    shares = rows_of_workers(program.rows, workers, conditions.speeds, is_balanced=options.is_balanced)
    steps = [scaled(step_of(program, rows / parts, compiled=options.compiled), slowness) for rows, slowness in shares]
    step = max(steps, key=lambda step: step.seconds)
    transfers = TransferCosts(measured.machine.transfers)
    drawn = data_seconds(measured, conditions)
    # The fastest worker has the most rows if they are balanced.
    memory = replica_bytes(program, max(rows / parts for rows, _ in shares), conditions.devices)
    if options.micro_batches > 1 or options.accumulated > 1:
        memory += program.gradient_bytes
    if workers == 1:
        seconds = _gradient_seconds(measured, step, options) + step.update_seconds + drawn
        seconds = max(seconds, program.data_seconds)
        return Prediction(seconds, seconds, 0.0, 0.0, 0.0, memory)
    dense = exchange_of(program, DENSE, workers)
    exchange = exchange_of(program, options.method, workers)
    if options.shard_state:
        exchange = _to_owners(exchange)
        memory -= program.slot_bytes * (1 - 1 / workers)
    if options.one_bucket:
        exchange, dense = _merged(exchange), _merged(dense)
    memory += exchange_bytes(exchange, dense) + measured.machine.connection_bytes
    costs = bucket_costs(exchange, dense, conditions.link, transfers, conditions.cores)
    gradients_end = _gradient_seconds(measured, step, options) + drawn
    begin = gradients_end - step.backward_seconds
    parts_done = ready_parts(program, len(costs))
    if conditions.cores == 1 and options.method != DENSE:
        parts_done = [1.0] * len(costs)  # one core encodes when it has computed all gradients
    ready = [begin + part * step.backward_seconds for part in parts_done]
    end = exchanged_seconds(gradients_end, ready, costs)
    update = step.update_seconds
    sent, link_seconds = wire_bytes(exchange.collectives, workers), sum(cost.link_seconds for cost in costs)
    core = sum(cost.core_seconds for cost in costs)
    if options.shard_state:
        # The update of 1 / N of the values counts in full: `docs/sharded_state.md` has measured no gain.
        returned = _weights(dense, workers)
        costs = bucket_costs(returned, returned, conditions.link, transfers, conditions.cores)
        end = exchanged_seconds(end + update, [end + update] * len(costs), costs) - update
        sent += wire_bytes(returned.collectives, workers)
        link_seconds += sum(cost.link_seconds for cost in costs)
        core += sum(cost.core_seconds for cost in costs)
    share = program.exchanges_per_step / options.accumulated  # the program may accumulate, too
    other_collectives = [_QUESTION, *(program.other_collectives or (_METRICS,))]
    beside = sum(wait_seconds(collective, workers, conditions.link, transfers) for collective in other_collectives)
    seconds = gradients_end + share * (end - gradients_end) + update / options.accumulated + beside
    seconds = max(expected_slowest(seconds, step.deviation_seconds, workers), program.data_seconds)
    compute_seconds = gradients_end + update / options.accumulated
    return Prediction(seconds, compute_seconds, core * share, link_seconds * share, sent * share, memory)


@dataclasses.dataclass(frozen=True)
class LocalTraining:
    """The options of local updates."""

    sync_every: int  # updates from one exchange of a variable to the next
    has_outer_optimizer: bool = False  # whether an outer optimizer with one slot applies the differences (DiLoCo)
    fragments: int = 1  # in how many parts, one after another, variables are exchanged
    overlap_steps: int = 0  # updates that are made while an exchange is under way
    method: str = DENSE  # the compression of differences, or `DENSE`
    compiled: bool = False  # whether XLA compiles the step


def exchanges_of_epoch(steps: int, sync_every: float) -> float:
    """Returns how often all variables are exchanged in an epoch: at its end, too, except just after an exchange.

    >>> exchanges_of_epoch(200, 100), exchanges_of_epoch(250, 100)
    (2, 3)
    """
    return math.ceil(steps / sync_every)


def predict_local_updates(
    measured: Measurements, conditions: Conditions, workers: int, options: LocalTraining
) -> Prediction:
    """Returns what is predicted of a step.

    An exchange costs what gradients of one update cost, `1 / sync_every` as often, and once more at the end of an
    epoch. The link is free while steps are computed, so workers wait only for what takes longer than `overlap_steps`.
    Workers meet once in `sync_every` steps, in which most of the differences of single steps cancel out.
    """
    program = measured.program
    steps = [
        (rows, scaled(step_of(program, rows / conditions.devices, compiled=options.compiled), slowness))
        for rows, slowness in rows_of_workers(program.rows, workers, conditions.speeds, is_balanced=False)
    ]
    rows, step = max(steps, key=lambda pair: pair[1].seconds)
    alone = step.seconds + data_seconds(measured, conditions)
    dense, exchange = exchange_of(program, DENSE, workers), exchange_of(program, options.method, workers)
    costs = bucket_costs(exchange, dense, conditions.link, TransferCosts(measured.machine.transfers), conditions.cores)
    whole = exchanged_seconds(0.0, [0.0] * len(costs), costs)
    core = sum(cost.core_seconds for cost in costs)
    link = sum(cost.link_seconds for cost in costs)
    # `sync_every` counts updates. A program that accumulates gradients makes fewer updates than steps.
    rounds = per_step = min(program.exchanges_per_step, 1.0) / options.sync_every
    if program.samples:
        steps_of_epoch = max(program.samples // program.rows, 1)
        rounds = exchanges_of_epoch(steps_of_epoch, 1 / per_step) / steps_of_epoch
    waited = whole
    if options.overlap_steps:
        meanwhile = options.overlap_steps * alone * options.fragments
        waited = core + max(whole - core - meanwhile, 0.0)
    seconds = alone + waited * per_step + whole * max(rounds - per_step, 0.0)
    deviation = step.deviation_seconds / math.sqrt(options.sync_every)
    memory = replica_bytes(program, rows / conditions.devices, conditions.devices) + exchange_bytes(exchange, dense)
    memory += program.gradient_bytes * (2 if options.has_outer_optimizer else 1)  # anchors, and the outer slot
    memory += measured.machine.connection_bytes
    return Prediction(
        max(expected_slowest(seconds, deviation, workers), program.data_seconds),
        alone,
        core * rounds,
        link * rounds,
        wire_bytes(exchange.collectives, workers) * rounds,
        memory,
    )


@dataclasses.dataclass(frozen=True)
class ParameterServers:
    """The options of parameter servers."""

    servers: int = 1
    asynchronous: bool = False  # whether each worker's batch is a separate update
    method: str = DENSE  # how gradients are encoded, or `DENSE`


def server_seconds(nbytes: float, workers: int, servers: int, bytes_per_second: float) -> float:
    """Returns how long links are busy until each worker has all variables of a model, or has pushed all gradients.

    >>> server_seconds(1e6, workers=8, servers=2, bytes_per_second=1e6)
    4.0
    >>> server_seconds(1e6, workers=2, servers=4, bytes_per_second=1e6)  # the workers' links
    1.0
    """
    return max(workers / servers, 1.0) * nbytes / bytes_per_second


def variables(measured: Measurements) -> int:
    """Returns how many messages carry the variables of a model. Each variable is sent by itself.

    A layer with weights counts as two variables, kernel and bias. If the model is no graph of layers, there is at least
    one variable for each bucket.
    """
    program = measured.program
    return max(2 * sum(layer.parameters > 0 for layer in program.layers), len(program.bucket_ready))


def predict_parameter_servers(
    measured: Measurements, conditions: Conditions, workers: int, options: ParameterServers
) -> Prediction:
    """Returns what is predicted of a global batch.

    Synchronous workers pull, compute their rows, push, and wait for the update of the servers. Asynchronous ones
    compute whole batches of the program, each at its own pace: the slower of workers and servers determines how many
    are computed. Pulls and pushes of different workers then overlap with computation.
    """
    program, link = measured.program, conditions.link
    transfers = TransferCosts(measured.machine.transfers)
    pushed = exchange_of(program, options.method, 2)
    share = (
        sum(collective.nbytes for collective in pushed.collectives)
        if options.method != DENSE
        else program.gradient_bytes
    )
    pull = program.variable_bytes
    copies = transfers.core_seconds(GATHER, pull, 2) + transfers.core_seconds(GATHER, share, 2)
    calls = _MESSAGES_IN_TURN * (transfers.seconds(GATHER, 0.0, 2) + link.latency_seconds)
    copies += 2 * variables(measured) * transfers.core_seconds(GATHER, 0.0, 2)
    code = pushed.compute_seconds if options.method != DENSE else 0.0
    steps = [
        (rows, scaled(step_of(program, rows), slowness))
        for rows, slowness in rows_of_workers(
            program.rows * (workers if options.asynchronous else 1), workers, conditions.speeds, is_balanced=False
        )
    ]
    rows, step = max(steps, key=lambda pair: pair[1].seconds)
    gradients = step.forward_seconds + step.backward_seconds
    core = (copies + code) / conditions.cores
    link_seconds = server_seconds(pull + share, workers, options.servers, link.bytes_per_second)
    served = max(workers / options.servers, 1.0) * copies / conditions.cores
    memory = replica_bytes(program, rows) - program.slot_bytes + pushed.state_bytes + share
    memory += measured.machine.connection_bytes
    if options.asynchronous:
        worker_seconds = gradients + core + calls + (pull + share) / link.bytes_per_second
        update = step.update_seconds / options.servers  # the servers apply the pushes of all workers
        seconds = max(worker_seconds / workers, link_seconds / workers, served / workers, update)
        return Prediction(seconds, gradients / workers, core / workers, link_seconds / workers, share / workers, memory)
    update = step.update_seconds / options.servers
    seconds = gradients + max(core, served) + calls + link_seconds + update
    seconds = expected_slowest(seconds, step.deviation_seconds, workers)
    return Prediction(seconds, gradients + update, max(core, served), link_seconds, share, memory)


def rows_of_workers(
    rows: int, workers: int, speeds: Sequence[float], *, is_balanced: bool
) -> list[tuple[float, float]]:
    """Returns how many rows each kind of worker computes, and how much slower than the measured one it is.

    The first speed is that of the measured worker; without speeds all are equal. Shares in proportion to the speeds let
    all workers end at the same time (`docs/load_balancing.md`).

    >>> rows_of_workers(120, 2, (), is_balanced=False), rows_of_workers(120, 2, (1.0, 0.5), is_balanced=False)
    ([(60.0, 1.0)], [(60.0, 1.0), (60.0, 2.0)])
    >>> rows_of_workers(120, 2, (1.0, 0.5), is_balanced=True)
    [(80.0, 1.0), (40.0, 2.0)]
    """
    if not speeds:
        return [(rows / workers, 1.0)]
    shares = [speed / sum(speeds) if is_balanced else 1 / workers for speed in speeds]
    return [(rows * share, speeds[0] / speed) for share, speed in zip(shares, speeds, strict=True)]


def data_seconds(measured: Measurements, conditions: Conditions) -> float:
    """Returns by how much the program's data lengthen a step.

    Each worker draws the complete batch and keeps its part, unless the data are files. A worker of one core draws
    between two steps, others beside them; no step is faster than its data.
    """
    return measured.program.data_seconds if conditions.cores == 1 else 0.0


def _gradient_seconds(measured: Measurements, step: StepCost, options: DataParallel) -> float:
    """Returns the time of all micro-batches, whose gradients are added."""
    additions = options.micro_batches - (options.accumulated == 1)
    gradients = options.micro_batches * (step.forward_seconds + step.backward_seconds)
    return gradients + additions * addition_seconds(measured.program, step)


def _to_owners(exchange: ExchangeMeasurement) -> ExchangeMeasurement:
    """Returns an exchange that sends each part of a bucket to its owner only (`docs/sharded_state.md`)."""
    collectives = []
    for bucket in by_bucket(exchange.collectives):
        two_phases = any(collective.kind == EXCHANGE for collective in bucket)
        collectives += [
            dataclasses.replace(collective, kind=EXCHANGE)
            for collective in bucket
            if not (two_phases and collective.kind == GATHER)
        ]
    return dataclasses.replace(exchange, collectives=tuple(collectives))


def _weights(dense: ExchangeMeasurement, workers: int) -> ExchangeMeasurement:
    """Returns the exchange that gathers the updated weights of each bucket: a worker packs its own and unpacks all."""
    gathers = tuple(
        Collective(GATHER, round(collective.nbytes / workers), collective.bucket) for collective in dense.collectives
    )
    seconds = dense.compute_seconds * (1 + 1 / workers) / 2
    return ExchangeMeasurement(DENSE, workers, seconds, gathers, 0, 0.0)


def _merged(exchange: ExchangeMeasurement) -> ExchangeMeasurement:
    """Returns an exchange with one bucket; tensors that were sent in the same round of their buckets are one tensor."""
    columns: dict[tuple[int, str], int] = {}
    for bucket in by_bucket(exchange.collectives):
        for index, collective in enumerate(bucket):
            columns[index, collective.kind] = columns.get((index, collective.kind), 0) + collective.nbytes
    merged = tuple(Collective(kind, nbytes, 0) for (_, kind), nbytes in sorted(columns.items()))
    return dataclasses.replace(exchange, collectives=merged)
