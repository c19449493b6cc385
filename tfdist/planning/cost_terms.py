"""Terms of predictions: what they contain, conditions of a run, stragglers, steps of one worker, and memory."""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from tfdist.planning.group_exchanges import bucket_bytes
from tfdist.planning.link_costs import LinkSpeed, interpolate
from tfdist.planning.measurements import ExchangeMeasurement, Measurements, ProgramMeasurement


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A step of a worker."""

    step_seconds: float  # the mean time of a step of the global batch
    compute_seconds: float  # part of it in which the worker computes gradients and updates
    exchange_seconds: float  # how long the cores encode, copy and decode
    link_seconds: float  # how long the busiest link is busy
    wire_bytes: float  # what a worker sends
    memory_bytes: float  # the largest resident memory of a worker


@dataclasses.dataclass(frozen=True)
class Conditions:
    """The machines, and what the user allows."""

    link: LinkSpeed  # the connection of each worker
    memory_bytes: int  # what a worker may use
    cores: int = 1  # cores of a worker. Steps are measured on as many.
    devices: int = 1  # devices of a worker, each of which computes as the measured one
    allow_compression: bool = False  # whether gradients may be rounded
    # whether updates may be computed from other weights or batches than the program's: local updates, asynchronous
    # parameter servers, accumulation over several batches
    allow_local_updates: bool = False
    speeds: Sequence[float] = ()  # measured speeds of the workers, in any unit; empty: equal


def expected_slowest(mean_seconds: float, deviation_seconds: float, workers: int) -> float:
    """Returns the expected time of the slowest of `workers` steps with normally distributed times.

    >>> [round(expected_slowest(1.0, 0.1, workers), 3) for workers in (1, 2, 1000)]
    [1.0, 1.059, 1.323]
    """
    if workers == 1:
        return mean_seconds
    # Blom 1958: the approximate expectation of the largest of N values of a normal distribution.
    return mean_seconds + deviation_seconds * statistics.NormalDist().inv_cdf((workers - 0.375) / (workers + 0.25))


@dataclasses.dataclass(frozen=True)
class StepCost:
    """The parts of a step that exchanges nothing."""

    forward_seconds: float  # up to the loss
    backward_seconds: float  # backpropagation
    update_seconds: float  # the optimizer
    deviation_seconds: float = 0.0  # standard deviation of the time of a step

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds + self.update_seconds


def measured_compilations(program: ProgramMeasurement) -> list[bool]:
    """Returns whether XLA has compiled steps, for each kind of measured steps."""
    return sorted({step.compiled for step in program.steps})


def step_of(program: ProgramMeasurement, rows: float, *, compiled: bool = False) -> StepCost:
    """Returns a step of `rows` samples.

    Times are linear between measured numbers of samples. From a single measured step only the update, which does not
    depend on the samples, counts as constant.
    """
    steps = sorted((step for step in program.steps if step.compiled == compiled), key=lambda step: step.rows)
    if len(steps) == 1:
        (measured_step,) = steps
        share = rows / measured_step.rows
        return StepCost(
            measured_step.forward_seconds * share,
            measured_step.backward_seconds * share,
            measured_step.update_seconds,
            measured_step.deviation_seconds,
        )

    def at(name: str) -> float:
        return interpolate([(step.rows, getattr(step, name)) for step in steps], rows)

    # Deviations are noise of the machine; beyond the measured steps they would grow without reason.
    within = min(max(rows, steps[0].rows), steps[-1].rows)
    deviation = interpolate([(step.rows, step.deviation_seconds) for step in steps], within)
    update = sum(step.update_seconds for step in steps) / len(steps)
    whole = max(at("seconds"), update)
    forward = min(at("forward_seconds"), whole - update)
    return StepCost(forward, whole - update - forward, update, deviation)


def scaled(step: StepCost, factor: float) -> StepCost:
    """Returns the step of a worker that takes `factor` times as long for everything.

    >>> scaled(StepCost(1.0, 2.0, 0.5), 2.0).seconds
    7.0
    """
    return StepCost(*(factor * getattr(step, field.name) for field in dataclasses.fields(step)))


def addition_seconds(program: ProgramMeasurement, step: StepCost) -> float:
    """Returns the time to add the gradients of a micro-batch to those of the earlier ones.

    Memory limits both an addition, which reads two values and writes one for each weight, and the optimizer's update,
    which reads weight, gradient and slots and writes weight and slots.
    """
    slots = program.slot_bytes / max(program.gradient_bytes, 1)
    return step.update_seconds * 3 / (3 + 2 * slots)


def on_shared_cores(measured: Measurements, workers: int) -> Measurements:
    """Returns the measurements of one of `workers` workers on this machine.

    They exchange by shared memory. Workers in one step compute, encode and wait at the same times, so that each gets an
    equal part of the cores.
    """
    machine, program = measured.machine, measured.program
    transfers = machine.local_transfers or machine.transfers
    slowness = max(workers * machine.cores_per_worker / machine.cores, 1.0)
    if slowness > 1.0:
        of_steps = "seconds deviation_seconds forward_seconds update_seconds"
        steps = tuple(_slower(record, slowness, of_steps) for record in program.steps)
        exchanges = tuple(_slower(record, slowness, "compute_seconds") for record in program.exchanges)
        layers = tuple(_slower(record, slowness, "seconds") for record in program.layers)
        transfers = tuple(_slower(record, slowness, "seconds core_seconds") for record in transfers)
        program = _slower(program, slowness, "data_seconds save_seconds start_seconds")
        program = dataclasses.replace(program, steps=steps, exchanges=exchanges, layers=layers)
    return dataclasses.replace(measured, program=program, machine=dataclasses.replace(machine, transfers=transfers))


def _slower(record: Any, factor: float, names: str) -> Any:
    return dataclasses.replace(record, **{name: factor * getattr(record, name) for name in names.split()})


def activation_bytes(program: ProgramMeasurement) -> float:
    """Returns how much more memory one more sample takes: by measured processes, at least the outputs of all layers."""
    return max(_memory(program)[1], float(sum(layer.activation_bytes for layer in program.layers)))


def _memory(program: ProgramMeasurement) -> tuple[float, float]:
    """Returns the memory of a process without samples, and of a sample."""
    steps = sorted((step for step in program.steps if not step.compiled), key=lambda step: step.rows)
    small, large = steps[0], steps[-1]
    slope = max(large.peak_bytes - small.peak_bytes, 0) / (large.rows - small.rows) if large.rows > small.rows else 0.0
    return large.peak_bytes - slope * large.rows, slope


def replica_bytes(program: ProgramMeasurement, rows: float, devices: int = 1) -> float:
    """Returns the memory of a process whose devices compute `rows` samples each and exchange nothing.

    Each further device has copies of weights, gradients and slots, and activations.
    """
    without_samples, of_sample = _memory(program)
    single_device_bytes = without_samples + of_sample * rows
    return single_device_bytes + (devices - 1) * max(single_device_bytes - program.process_bytes, copy_bytes(program))


def copy_bytes(program: ProgramMeasurement) -> float:
    """Returns the bytes of a copy of the model that is trained: weights, gradients and slots."""
    return float(program.variable_bytes + program.gradient_bytes + program.slot_bytes)


def exchange_bytes(exchange: ExchangeMeasurement, dense: ExchangeMeasurement) -> float:
    """Returns what an exchange takes beside gradients: states, and packed buckets before and after their sum."""
    # A link that is slower than backpropagation makes all buckets wait at the same time, sent and received ones.
    return exchange.state_bytes + 2 * sum(bucket_bytes(dense))
