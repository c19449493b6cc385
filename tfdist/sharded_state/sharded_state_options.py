"""What of an optimizer's state is split over the replicas."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ShardedState:
    """What `shard_optimizer_state` splits, for a mirrored strategy. `True` stands for `ShardedState()`.

    Attributes:
        accumulators: Whether the sums of gradients of `gradient_accumulation_steps` are split, too (stage 2 of ZeRO):
            a replica keeps those of its part. Gradients are then sent in every micro-step instead of once an update.
        weights_dtype: "bfloat16": updated weights are sent in this dtype, half of the bytes. All replicas compute with
            these weights, while each keeps its part of the exact ones, to which updates are applied. `None`: the dtype
            of the weights.

    >>> from tfdist.strategies import MirroredStrategy, ShardedState
    >>> strategy = MirroredStrategy(["CPU:0", "CPU:1"], shard_optimizer_state=ShardedState(accumulators=True))
    >>> strategy.num_replicas_in_sync
    2
    """

    accumulators: bool = False
    weights_dtype: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.accumulators, bool):
            raise ValueError(
                f"Invalid `accumulators` of a ShardedState. Received: {self.accumulators!r}. Expected: True or False."
            )
        if self.weights_dtype not in (None, "bfloat16"):
            raise ValueError(
                f"Invalid `weights_dtype` of a ShardedState. Received: {self.weights_dtype!r}. Expected: 'bfloat16' or "
                "None."
            )


def sharded_state_of(argument: Any) -> ShardedState | None:
    """Returns what the argument `shard_optimizer_state` of a strategy demands; `None` if nothing is split.

    Raises:
        ValueError: If it is invalid.
    """
    if isinstance(argument, ShardedState):
        return argument
    if not isinstance(argument, bool):
        raise ValueError(
            f"Invalid `shard_optimizer_state`. Received: {argument!r}. Expected: True, False or a "
            "`tfdist.strategies.ShardedState`. Pass one of them."
        )
    return ShardedState() if argument else None
