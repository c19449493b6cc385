"""What is predicted of a plan, with the parts of a step that say why."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A step of a worker.

    Attributes:
        step_seconds: The mean time of a step of the global batch.
        compute_seconds: Part of it in which the worker computes gradients and updates.
        exchange_seconds: How long the cores encode, copy and decode.
        link_seconds: How long the busiest link is busy.
        wire_bytes: What a worker sends.
        memory_bytes: The largest resident memory of a worker.
    """

    step_seconds: float
    compute_seconds: float
    exchange_seconds: float
    link_seconds: float
    wire_bytes: float
    memory_bytes: float
