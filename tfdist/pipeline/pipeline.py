"""Pipeline: the options of pipeline parallelism."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tfdist.utils.argument_checks import check_whole_number

SCHEDULES = ("1f1b", "gpipe")


@dataclass(frozen=True)
class Pipeline:
    """How a model is cut into stages, and in which order these compute the micro-batches of a batch.

    Attributes:
        stages: The number of parts of the model. Each of them runs on a separate device.
        micro_batches: The number of parts of a batch. More of them shorten the bubble, the time in which a device
            waits for others: it takes `(stages - 1) / (micro_batches + stages - 1)` of a step.
        schedule: "1f1b" (Narayanan et al. 2019, "PipeDream"; here with a flush after each batch): stage s computes
            `stages - s` micro-batches forward and then one backward and one forward in turn, so it holds the
            activations of `stages - s` micro-batches. "gpipe" (Huang et al. 2019, "GPipe"): all forward, then all
            backward; holds the activations of all micro-batches.
        cuts: The names of the first layers of stages 1, 2 and so on. By default the parts have similar cost.
        costs: By the name of a layer the cost of a call of it, in any unit, such as the seconds that
            `strategy.measure_costs` returns; other layers cost nothing. By default costs are estimated.

    >>> Pipeline(stages=4, micro_batches=8).bubble_fraction
    0.2727...
    """

    stages: int
    micro_batches: int = 4
    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    cuts: Sequence[str] | None = None
    costs: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        check_whole_number("stages", self.stages, at_least=1)
        check_whole_number("micro_batches", self.micro_batches, at_least=1)
        if self.schedule not in SCHEDULES:
            raise ValueError(
                f"Invalid `schedule` of a pipeline. Received: schedule={self.schedule!r}. Expected: '1f1b' or 'gpipe'."
            )
        if self.costs is not None and not (
            isinstance(self.costs, Mapping) and all(0 <= cost < math.inf for cost in self.costs.values())
        ):
            raise ValueError(
                f"Invalid `costs` of a pipeline. Received: costs={self.costs!r}. Expected: a dict of numbers from 0 on "
                "by the names of layers; or None."
            )
        if self.cuts is None:
            return
        is_names = not isinstance(self.cuts, str) and all(isinstance(name, str) for name in self.cuts)
        if not is_names or len(self.cuts) != self.stages - 1:
            raise ValueError(
                f"Invalid `cuts` of a pipeline. Received: cuts={self.cuts!r} with stages={self.stages}. Expected: "
                f"the names of the first layers of stages 1 to {self.stages - 1}, {self.stages - 1} in total; or None."
            )

    @property
    def bubble_fraction(self) -> float:
        """The fraction of a step in which a stage waits, if all stages take the same time."""
        return (self.stages - 1) / (self.micro_batches + self.stages - 1)
