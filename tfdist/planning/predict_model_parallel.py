"""Steps of a model whose layers are on several workers: pipelines of stages, split layers, and copies of both.

Sources: Huang et al. 2019, "GPipe"; Narayanan et al. 2021, "Efficient large-scale language model training on GPU
clusters using Megatron-LM", section 2.2: `P - 1` of `M + P - 1` slots are idle.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence

from tfdist.planning.cost_terms import (
    Conditions,
    Prediction,
    activation_bytes,
    addition_seconds,
    copy_bytes,
    expected_slowest,
    step_of,
)
from tfdist.planning.group_exchanges import exchange_of, wire_bytes
from tfdist.planning.link_costs import TransferCosts, collective_seconds, sent_bytes
from tfdist.planning.measurements import DENSE, GATHER, SUM, LayerMeasurement, Measurements
from tfdist.utils.balanced_starts import balanced_starts

_RESOLUTION = 10**6  # costs of layers are millionths of their sum, as in `pipeline/stages.py`
# A block of a transformer has two sums of its activations in each direction (`docs/communication_volume.md`); a pair of
# dense layers has one, so for these it is an upper limit.
_SUMS_OF_LAYER = 4


@dataclasses.dataclass(frozen=True)
class ModelParallel:
    """The options of model parallel training."""

    stages: int = 1  # the parts into which the sequence of layers is cut
    columns: int = 1  # copies of all stages, each of which computes a part of a batch
    ways: int = 1  # the workers that share the layers of a stage
    micro_batches: int = 4  # the parts of a column's rows
    method: str = DENSE  # the compression of gradients between columns, or `DENSE`

    @property
    def workers(self) -> int:
        return self.stages * self.columns * self.ways


@functools.lru_cache(maxsize=256)
def stage_layers(layers: tuple[LayerMeasurement, ...], stages: int) -> list[tuple[LayerMeasurement, ...]]:
    """Returns the layers of each stage: cuts that send little, of stages that take about as long.

    >>> layers = tuple(LayerMeasurement(name, 1.0, 10, 8) for name in "abcd")
    >>> [[layer.name for layer in stage] for stage in stage_layers(layers, 2)]
    [['a', 'b'], ['c', 'd']]
    """
    total = sum(layer.seconds for layer in layers) or 1.0
    costs = [round(layer.seconds / total * _RESOLUTION) for layer in layers]
    sent = [0, *(layer.activation_bytes for layer in layers[:-1])]
    starts = [*balanced_starts(costs, stages, sent), len(layers)]
    return [layers[begin:end] for begin, end in itertools.pairwise(starts)]


def predict_model_parallel(measured: Measurements, conditions: Conditions, options: ModelParallel) -> Prediction:
    """Returns what is predicted of a step.

    A stage has the part of a measured step that its layers have of the time of all layers. Activations and their
    gradients pass the cuts; then the columns sum the gradients of each stage. Layers that are split compute `1 / ways`
    of their time, and sum activations.
    """
    program, link = measured.program, conditions.link
    transfers = TransferCosts(measured.machine.transfers)
    rows = program.rows / options.columns / options.micro_batches
    step = step_of(program, rows)
    stages = stage_layers(program.layers, options.stages)
    all_seconds = sum(layer.seconds for layer in program.layers) or 1.0
    all_weights = sum(layer.parameters for layer in program.layers) or 1
    shares = [sum(layer.seconds for layer in stage) / all_seconds for stage in stages]
    weights = [sum(layer.parameters for layer in stage) / all_weights / options.ways for stage in stages]

    cuts = [stage[-1].activation_bytes * rows / options.ways for stage in stages[:-1]]
    hops = [(before, after) for before, after in zip([0.0, *cuts], [*cuts, 0.0], strict=True)]
    copies = [
        2 * sum(transfers.core_seconds(GATHER, nbytes, 2) for nbytes in hop if nbytes) / conditions.cores
        for hop in hops
    ]
    added = addition_seconds(program, step)
    computed = [
        share * (step.forward_seconds + step.backward_seconds) / options.ways + weight * added
        for share, weight in zip(shares, weights, strict=True)
    ]
    sums = [_sums(stage, rows, options.ways, conditions, transfers) for stage in stages]
    busy = [sum(parts) for parts in zip(computed, copies, (seconds for seconds, _ in sums), strict=True)]
    widest = max(cuts, default=0.0)
    hop_link = widest / link.bytes_per_second
    hop = link.latency_seconds + hop_link + (transfers.seconds(GATHER, widest, 2) if cuts else 0.0)
    seconds = pipeline_seconds(busy, options.micro_batches, hop, hop_link)

    reduced = [_column_sums(measured, conditions, options, share) for share in weights]
    update = max(weights) * step.update_seconds
    worker = max(range(options.stages), key=lambda stage: busy[stage])
    sent = [
        options.micro_batches * (sum(hop) + split) + reduced_bytes
        for hop, (_, split), (_, reduced_bytes) in zip(hops, sums, reduced, strict=True)
    ]
    seconds = seconds + max(summed for summed, _ in reduced) + update
    seconds = expected_slowest(seconds, step.deviation_seconds, options.workers)
    seconds = max(seconds, program.data_seconds)  # the chief draws all data, beside the workers
    held = activation_bytes(program)
    outputs = sum(layer.activation_bytes for layer in program.layers) or 1
    memory = measured.machine.connection_bytes + max(
        program.process_bytes
        + share * copy_bytes(program)
        + min(options.stages - index, options.micro_batches)  # whose activations a stage holds at the same time
        * rows
        * held
        * sum(layer.activation_bytes for layer in stage)
        / outputs
        / options.ways
        for index, (stage, share) in enumerate(zip(stages, weights, strict=True))
    )
    return Prediction(
        seconds,
        options.micro_batches * computed[worker] + update,
        options.micro_batches * copies[worker],
        max(
            options.micro_batches * (hop_link + max(split for _, split in sums) / link.bytes_per_second),
            max(reduced_bytes for _, reduced_bytes in reduced) / link.bytes_per_second,
        ),
        max(sent),
        memory,
    )


def _sums(
    stage: tuple[LayerMeasurement, ...], rows: float, ways: int, conditions: Conditions, transfers: TransferCosts
) -> tuple[float, float]:
    """Returns the seconds and the bytes of the sums of a micro-batch between the workers of a stage."""
    if ways == 1:
        return 0.0, 0.0
    sizes = [rows * layer.activation_bytes for layer in stage if layer.parameters]
    seconds = sum(
        collective_seconds(SUM, size, ways, conditions.link) + transfers.core_seconds(SUM, size, ways) for size in sizes
    )
    return _SUMS_OF_LAYER * seconds, _SUMS_OF_LAYER * sum(sent_bytes(SUM, size, ways) for size in sizes)


def _column_sums(
    measured: Measurements, conditions: Conditions, options: ModelParallel, share: float
) -> tuple[float, float]:
    """Returns how long columns sum the gradients of a stage, after its last micro-batch, and what each sends."""
    columns = options.columns
    if columns == 1:
        return 0.0, 0.0
    exchange = exchange_of(measured.program, options.method, columns)
    transfers = TransferCosts(measured.machine.transfers)
    sizes = [(collective.kind, collective.nbytes * share) for collective in exchange.collectives]
    core = sum(transfers.core_seconds(kind, nbytes, columns) for kind, nbytes in sizes)
    core += exchange.compute_seconds * share
    on_link = sum(collective_seconds(kind, nbytes, columns, conditions.link) for kind, nbytes in sizes)
    return max(core / conditions.cores, on_link), share * wire_bytes(exchange.collectives, columns)


def bubble(stages: int, micro_batches: int) -> float:
    """Returns the part of a step in which a stage waits.

    >>> bubble(1, 4), bubble(4, 4), bubble(4, 12)
    (0.0, 0.42857142857142855, 0.2)
    """
    return (stages - 1) / (micro_batches + stages - 1)


def pipeline_seconds(
    stage_seconds: Sequence[float], micro_batches: int, hop_seconds: float = 0.0, hop_link_seconds: float = 0.0
) -> float:
    """Returns the time of the forward and backward passes of a step.

    `hop_seconds` is how long activations, or their gradients, take from a stage to the next one, and `hop_link_seconds`
    how long they occupy one direction of a link.

    The slowest stage, or the slowest link, is busy with all micro-batches; before its first and after its last one, the
    others compute one each, and activations and gradients pass every cut once. By 1F1B, stage `s` of `P` begins another
    micro-batch when the gradients of one of `P - s` have returned: on slow links stages wait for this.

    >>> pipeline_seconds([1.0, 1.0], 4), pipeline_seconds([1.0, 2.0], 4), pipeline_seconds([1.0, 1.0], 4, 0.5)
    (5.0, 9.0, 7.5)
    """
    pace = max(*stage_seconds, hop_link_seconds)
    stages = len(stage_seconds)
    for stage in range(stages):
        begun = stages - stage
        if micro_batches > begun:
            pace = max(pace, (sum(stage_seconds[stage:]) + 2 * (begun - 1) * hop_seconds) / begun)
    return sum(stage_seconds) + (micro_batches - 1) * pace + 2 * (stages - 1) * hop_seconds
