"""Whether the data, and the arguments of `fit`, are those of the run that is to go on."""

import warnings
from typing import Any, Protocol

from tfdist.keras_internals.element_description import Description, first_difference


class PositionLike(Protocol):
    """What `resume_at` needs to know; `tfdist.recovery.position.Position` says what the names mean."""

    @property
    def next_step(self) -> int: ...
    @property
    def finished(self) -> tuple[int, ...]: ...
    @property
    def current(self) -> int | None: ...
    @property
    def num_batches(self) -> int | None: ...
    @property
    def steps_per_epoch(self) -> int | None: ...
    @property
    def steps_per_execution(self) -> int: ...
    @property
    def source(self) -> str: ...
    @property
    def batch_size(self) -> int | None: ...
    @property
    def elements(self) -> Description | None: ...
    @property
    def is_each_workers_own(self) -> bool: ...
    @property
    def order(self) -> dict[str, Any]: ...
    @property
    def validated(self) -> tuple[int, ...]: ...
    @property
    def is_validated_by_itself(self) -> bool: ...


def check_same_data(position: PositionLike, now: dict[str, Any], *, same_workers: bool = True) -> None:
    """Raises an error that names the first difference.

    Args:
      position: of the run that is to go on.
      now: the same attributes of this one. What is not known of either side is not compared, where it may be unknown.
      same_workers: whether as many workers train as before. If not, the batch size may be made of their number, and a
        warning says that it is another one.

    Raises:
      ValueError: something differs.
    """
    for name, attribute in {
        "kind of data": "source",
        "steps_per_epoch": "steps_per_epoch",
        "steps_per_execution": "steps_per_execution",
        "number of batches": "num_batches",
        "batch size": "batch_size",
    }.items():
        before, present = getattr(position, attribute), now[attribute]
        if attribute in ("num_batches", "batch_size") and (before is None or present is None):
            continue
        if before != present:
            if attribute == "batch_size" and not same_workers:
                _tell_of_batch_size(present, before)
            else:
                _refuse(name, str(present), str(before))
    if position.elements is not None and now["elements"] is not None:
        difference = first_difference(position.elements, now["elements"])
        if difference is not None:
            path, before, present = difference
            _refuse(f"element {path}", present, before)


def _tell_of_batch_size(now: int, before: int) -> None:
    warnings.warn(
        f"The batch size is another one than before the restart, as is the number of workers. Received: {now}. "
        f"Expected: {before}, as the batch size is that of all workers together. Training goes on behind as many "
        "batches as before, of the size that they have now: in this pass over the data some samples may come twice and "
        "others not at all. To go on exactly, give data sets a batch size that does not depend on the number of "
        "workers (`num_replicas_in_sync`).",
        RuntimeWarning,
        stacklevel=2,
    )


def _refuse(name: str, now: str, before: str) -> None:
    raise ValueError(
        f"The training data differs from that of the run that is to go on, in its {name}. Received: {now}. Expected: "
        f"{before}. Give `fit` the data and the arguments that it had, or begin a new training."
    )
