"""Steps of workers that train by themselves and exchange weights after many updates.

Sources: Stich 2019, "Local SGD converges fast and communicates little"; Douillard et al. 2023, "DiLoCo"; 2025,
"Streaming DiLoCo with overlapping communication".
"""

import dataclasses
import math

from tfdist.planning.cost_terms import Conditions, Prediction, exchange_bytes, expected_slowest, replica_bytes
from tfdist.planning.group_exchanges import bucket_costs, exchange_of, exchanged_seconds, wire_bytes
from tfdist.planning.link_costs import TransferCosts
from tfdist.planning.measurements import DENSE, Measurements
from tfdist.planning.predict_data_parallel import data_seconds, rows_of_workers
from tfdist.planning.step_costs import scaled, step_of


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
