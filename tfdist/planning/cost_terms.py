"""Terms of predictions: conditions of a run, stragglers, memory, and what a prediction contains."""

import dataclasses
import statistics
from collections.abc import Sequence

from tfdist.planning.group_exchanges import bucket_bytes
from tfdist.planning.link_costs import LinkSpeed
from tfdist.planning.measurements import ExchangeMeasurement, ProgramMeasurement
from tfdist.planning.step_costs import peak_bytes


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


def replica_bytes(program: ProgramMeasurement, rows: float, devices: int = 1) -> float:
    """Returns the memory of a process whose devices compute `rows` samples each and exchange nothing.

    Each further device has copies of weights, gradients and slots, and activations.
    """
    single_device_bytes = peak_bytes(program, rows)
    return single_device_bytes + (devices - 1) * max(single_device_bytes - program.process_bytes, copy_bytes(program))


def copy_bytes(program: ProgramMeasurement) -> float:
    """Returns the bytes of a copy of the model that is trained: weights, gradients and slots."""
    return float(program.variable_bytes + program.gradient_bytes + program.slot_bytes)


def exchange_bytes(exchange: ExchangeMeasurement, dense: ExchangeMeasurement) -> float:
    """Returns what an exchange takes beside gradients: states, and packed buckets before and after their sum."""
    return exchange.state_bytes + buffer_bytes(bucket_bytes(dense))


def buffer_bytes(buckets: Sequence[float]) -> float:
    """Returns the bytes of packed buckets, each as it is sent and as it is received.

    A link that is slower than backpropagation makes all of them wait at the same time.

    >>> buffer_bytes([4.0, 16.0])
    40.0
    """
    return 2 * sum(buckets)
