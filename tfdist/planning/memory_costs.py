"""The memory of a worker."""

from collections.abc import Sequence

from tfdist.planning.group_exchanges import bucket_bytes
from tfdist.planning.measurements import ExchangeMeasurement, ProgramMeasurement
from tfdist.planning.step_costs import peak_bytes


def replica_bytes(program: ProgramMeasurement, rows: float, devices: int = 1) -> float:
    """Returns the memory of a process whose devices compute `rows` samples each and exchange nothing.

    Each further device has copies of weights, gradients and slots, and activations.
    """
    own = peak_bytes(program, rows)
    return own + (devices - 1) * max(own - program.process_bytes, copy_bytes(program))


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
