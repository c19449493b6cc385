"""The modes in which workers train by themselves between two exchanges of weights."""

import dataclasses
from typing import Any

from tfdist.utils.argument_checks import check_seconds, check_whole_number, is_number, is_whole_number


@dataclasses.dataclass(frozen=True)
class LocalSGD:
    """Each worker trains by itself; after every `sync_every` updates the workers' weights are replaced by their mean.

    Pass it as `mode=` to `MultiWorkerMirroredStrategy`. Workers count by their samples since the last exchange. The
    optimizer's slots stay local. Source: Stich 2019, "Local SGD Converges Fast and Communicates Little".

    >>> LocalSGD(sync_every=20)
    LocalSGD(sync_every=20)

    Attributes:
        sync_every: The number of updates of the optimizer from one exchange to the next. With gradient accumulation an
            update consists of several steps.
    """

    sync_every: int = 20

    def __post_init__(self) -> None:
        check_whole_number("sync_every", self.sync_every, at_least=1, example=20)

    @property
    def fragments(self) -> int:
        """All variables are exchanged together."""
        return 1

    @property
    def overlap_steps(self) -> int:
        """The exchange is complete before the next update."""
        return 0

    @property
    def kept_share(self) -> float:
        """Workers keep no share of their weights after an exchange."""
        return 0.0


@dataclasses.dataclass(frozen=True)
class DiLoCo:
    """Each worker trains by itself; an outer optimizer applies the mean of their progress to weights that all share.

    After every `sync_every` updates, the differences between the shared weights (the *anchors*) and the workers'
    weights are averaged and given to the outer optimizer as a gradient; the workers continue from its result. Sources:
    Douillard et al. 2023, "DiLoCo"; 2025, "Streaming DiLoCo with overlapping communication".

    >>> DiLoCo(sync_every=50, fragments=4, overlap_steps=10)
    DiLoCo(sync_every=50, outer_optimizer=None, fragments=4, overlap_steps=10, mixing=None, timeout_seconds=600.0)

    Attributes:
        sync_every: The number of updates of the optimizer from one exchange of a variable to the next.
        outer_optimizer: A function without arguments that returns a Keras optimizer, a name or a configuration of one
            (see `keras.optimizers.get`); on one worker also an optimizer, whose configuration is used. By default
            `SGD(0.7, momentum=0.9, nesterov=True)`. Under a cluster no optimizer can be created before the strategy.
        fragments: The number of groups of variables, of about equal bytes, that are exchanged in turn, evenly
            spread over `sync_every` updates.
        overlap_steps: How many updates are made while an exchange is under way. Its result is applied after that
            number of updates, whenever it arrives, so that numbers do not depend on the network. 0: the workers wait.
        mixing: The share of a worker's own weights in the result of an exchange, from 0 to below 1; the rest are the
            anchors. By default 0.5 if `overlap_steps` is above 0, so that the updates made meanwhile are not lost,
            else 0.
        timeout_seconds: How many seconds an exchange may take that is under way while steps run.
    """

    sync_every: int = 50
    outer_optimizer: Any = None
    fragments: int = 1
    overlap_steps: int = 0
    mixing: float | None = None
    timeout_seconds: float = 600.0

    def __post_init__(self) -> None:
        check_whole_number("sync_every", self.sync_every, at_least=1, example=50)
        if not is_whole_number(self.fragments, at_least=1) or self.fragments > self.sync_every:
            raise ValueError(
                f"Invalid `fragments`. Received: fragments={self.fragments!r}, sync_every={self.sync_every}. Expected: "
                "a whole number of at least 1 and at most `sync_every`, because fragments take turns."
            )
        if not is_whole_number(self.overlap_steps, at_least=0) or self.overlap_steps >= self.sync_every:
            raise ValueError(
                f"Invalid `overlap_steps`. Received: overlap_steps={self.overlap_steps!r}, "
                f"sync_every={self.sync_every}. Expected: a whole number of at least 0 and less than `sync_every`, "
                "because an exchange of a variable ends before its next one begins."
            )
        if self.mixing is not None and (not is_number(self.mixing, at_least=0) or self.mixing >= 1):
            raise ValueError(
                f"Invalid `mixing`. Received: mixing={self.mixing!r}. Expected: a number of at least 0 and below 1, or "
                "None for 0.5 if `overlap_steps` is above 0, else 0."
            )
        check_seconds("timeout_seconds", self.timeout_seconds)

    @property
    def kept_share(self) -> float:
        """The share of a worker's own weights in the result of an exchange."""
        return (0.5 if self.overlap_steps else 0.0) if self.mixing is None else float(self.mixing)


LocalMode = LocalSGD | DiLoCo
