"""The position of a custom loop: its epochs, the passes over data in them, and the batches of each."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import tensorflow as tf

from tfdist.data_position.dataset_source import DatasetSource
from tfdist.data_position.position import Position, check_same_data
from tfdist.data_position.python_randomness import global_states, set_global_states


@dataclass(frozen=True)
class LoopPosition:
    """A position between two batches of a loop.

    >>> position = LoopPosition(epoch=2, batch=5, dataset=0)
    >>> LoopPosition.from_json(position.to_json()) == position
    True

    Attributes:
        epoch: The present epoch.
        passes: How many passes over data have ended in this epoch, besides those within other passes.
        batch: How many batches the present pass has drawn.
        steps: How many batches all passes have drawn.
        dataset: The dataset of the present pass: its number, in the order in which the loop has used them first. None:
            no pass has begun since the last one has ended.
        data: The position in each dataset that has been used.
    """

    epoch: int = 0
    passes: int = 0
    batch: int = 0
    steps: int = 0
    dataset: int | None = None
    data: tuple[Position, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns it as JSON."""
        return {**asdict(self), "data": [one.to_json() for one in self.data]}

    @classmethod
    def from_json(cls, json: dict[str, Any]) -> "LoopPosition":
        """Returns the position that `to_json` has written."""
        return cls(**{**json, "data": tuple(map(Position.from_json, json["data"]))})


class LoopPasses:
    """The epochs and passes of a loop, which begin elsewhere after `resume_at`.

    Args:
        source_of: Returns the source behind data that the loop draws from; called once for each.
        is_tracked: Whether the position is needed.
        needs_same_order: Whether another order of the data than that of the position is an error; else it is a warning,
            as in `fit`.

    Attributes:
        epoch: The present epoch.
        batch: How many batches the present pass has drawn.
        steps: How many batches all passes have drawn.
        is_in_pass: Whether a pass has begun and not ended.
        is_resuming: Whether the position of `resume_at` is not reached yet.
    """

    def __init__(
        self, source_of: Callable[[Any], DatasetSource], *, is_tracked: bool = True, needs_same_order: bool = False
    ) -> None:
        self._source_of, self._is_tracked, self._needs_same_order = source_of, is_tracked, needs_same_order
        self.epoch = self.batch = self.steps = 0
        self.is_in_pass = False
        self._passes = 0  # over data that have begun in this epoch, besides those within other passes
        self._current: tuple[int, int] | None = None  # number and dataset of the present one of these
        self._data: list[_LoopData] = []  # in the order of their first use
        self._resumes_at: LoopPosition | None = None
        self._resume: Callable[[], None] | None = None  # called when the state of the position is to be loaded
        self._saved: tuple[Position, ...] = ()
        self._same_workers = True

    @property
    def is_resuming(self) -> bool:
        return self._resumes_at is not None

    def resume_at(self, position: LoopPosition, resume: Callable[[], None], *, same_workers: bool = True) -> None:
        """Makes `epochs` and `batches` begin at a position.

        `resume` is called at the position, after the code of the loop that precedes it has run again. Without
        `same_workers`, the number of workers has changed since then.
        """
        self._resumes_at, self._resume, self._same_workers = position, resume, same_workers
        self._saved, self.steps = position.data, position.steps

    def position(self) -> LoopPosition:
        """Returns the present position, within a pass after the batch that was drawn last.

        After the body of an epoch that `epochs` has yielded, it is the beginning of the next one.
        """
        number, dataset = self._current or (self._passes, None)
        batch = 0 if dataset is None else self.batch
        data = tuple(one.position(batch if index == dataset else None) for index, one in enumerate(self._data))
        data = (*data, *self._saved[len(data) :])  # a loop that has resumed may not have used all of them yet
        return LoopPosition(self.epoch, number, batch, self.steps, dataset, data)

    def epochs(self, number: int) -> Iterator[int]:
        """Yields the numbers of epochs up to `number - 1`, from 0 or from that of the position."""
        position = self._resumes_at
        first = 0 if position is None else position.epoch
        if position is not None and position.dataset is None and position.passes == 0:
            self.restore()
        for self.epoch in range(first, number):
            if self.epoch > 0:  # passes before the first epoch belong to it
                self._passes = 0
            is_complete = False
            try:
                yield self.epoch
                is_complete = True
            finally:
                if is_complete or not self.is_in_pass:  # also if the loop leaves its last epoch after the passes
                    self._begin_epoch(self.epoch + 1)
        self._begin_epoch(max(first, number))

    def _begin_epoch(self, number: int) -> None:
        self.epoch, self._passes, self._current = number, 0, None

    def batches(self, dataset: Any, limit: int | None = None) -> Iterator[Any]:
        """Yields the batches of a pass over data, from that of the position, and none of a pass before it.

        Raises:
            ValueError: The data of this pass, or its order, is another one than that of the position; or it is a
                loader, within a pass over it.
        """
        number, data = self._data_of(dataset)
        is_inner, position, own_pass, outer_batch = self.is_in_pass, self._resumes_at, self._passes, self.batch
        if not is_inner:
            self._passes += 1
        if position is not None and (self.epoch, own_pass) < (position.epoch, position.passes):
            return
        if data.is_in_pass and data.source.has_one_pass:
            raise ValueError(
                f"A loader has one position. Received: a {data.source.kind}, within a pass over it. Expected: one pass "
                "after another. Give the inner pass another loader."
            )
        drawn = 0 if position is None else position.batch
        iterator = data.iterator() if position is None else self._resumed(position, own_pass, number, data)
        if not is_inner:
            self._current = (own_pass, number)
        self.is_in_pass, self.batch, was_in_pass = True, drawn, data.is_in_pass
        data.is_in_pass = True
        try:
            while limit is None or drawn < limit:
                try:
                    batch = next(iterator)
                except (StopIteration, tf.errors.OutOfRangeError):
                    break
                drawn, self.steps = drawn + 1, self.steps + 1
                self.batch = drawn
                yield batch
        finally:
            self.is_in_pass, self.batch = is_inner, outer_batch if is_inner else drawn
            if not is_inner:
                self._current = None
            data.is_in_pass = was_in_pass
            data.source.end_pass(drawn)
            data.finished.append(drawn)

    def _data_of(self, dataset: Any) -> tuple[int, "_LoopData"]:
        for number, one in enumerate(self._data):
            if one.dataset is dataset:
                return number, one
        states = global_states()
        number, one = len(self._data), _LoopData(dataset, self._source_of(dataset))
        if number < len(self._saved):  # reading the shapes of a loader's batches has drawn before the position, too
            set_global_states(states)
        if self._is_tracked:
            one.source.track_position(None)
        if number < len(self._saved):
            saved = self._saved[number]
            seeds = saved.order.get("seeds")
            if self._needs_same_order and seeds != (own_seeds := one.source.order(None).get("seeds")):
                raise _other_data(f"seeds {own_seeds} of dataset {number}", f"{seeds}")
            one.resume_at(saved, same_workers=self._same_workers)
        self._data.append(one)
        return number, one

    def _resumed(self, position: LoopPosition, own_pass: int, number: int, data: "_LoopData") -> Any:
        """Returns an iterator over the rest of a pass."""
        ours = (self.epoch, own_pass, number)
        theirs = (position.epoch, position.passes, number if position.dataset is None else position.dataset)
        if theirs != ours:
            raise _other_data(f"epoch, pass and dataset {ours}, counted from 0", f"{theirs}")
        if position.dataset is None:
            self.restore()
            return data.iterator()
        data.return_to_position()
        self.restore()  # before the iterator exists, which may read ahead by code that draws random numbers
        return data.source.iterator_at(position.batch)

    def restore(self) -> None:
        """Calls `resume` of `resume_at`, at the position or after a loop that has not reached it."""
        resume, self._resumes_at, self._resume = self._resume, None, None
        assert resume is not None
        resume()


class _LoopData:
    """A dataset of a loop.

    Attributes:
        dataset: The dataset.
        source: The source behind it.
        finished: The number of batches of each pass that has ended.
        is_in_pass: Whether a pass over it has begun and not ended.
    """

    def __init__(self, dataset: Any, source: DatasetSource) -> None:
        self.dataset, self.source = dataset, source
        self.finished: list[int] = []
        self.is_in_pass = False
        self._traits: dict[str, Any] | None = None
        self._resuming: Position | None = None  # until the order of the source is that of the position

    def resume_at(self, position: Position, *, same_workers: bool) -> None:
        """The next pass is that of the position, or the one after it. Draws nothing.

        Raises:
            ValueError: It is other data.
        """
        fixed = {"num_batches": None, "steps_per_epoch": None, "steps_per_execution": 1}
        check_same_data(position, {**fixed, **self._known_traits()}, same_workers=same_workers)
        self.source.check(position.order, position.drawn, True)
        self.finished, self._resuming = list(position.finished), position

    def position(self, current: int | None) -> Position:
        """Returns the position after this number of batches of a pass; None: between two passes."""
        if self._resuming is not None:
            return self._resuming
        order = self.source.order(current)
        return Position(0, tuple(self.finished), current, None, None, 1, order=order, **self._known_traits())

    def iterator(self) -> Any:
        """Returns an iterator for a new pass."""
        if self._resuming is not None:
            states = global_states()  # other code that draws continues where it is
            self.return_to_position()
            set_global_states(states)
        return self.source.iterator()

    def return_to_position(self) -> None:
        """Makes the order of the source that of the position."""
        position, self._resuming = self._resuming, None
        assert position is not None
        self.source.replay_iterators(position.finished)
        self.source.restore(position.order, position.current, position.current is not None)

    def _known_traits(self) -> dict[str, Any]:
        if self._traits is None:  # expensive: reads all functions of the pipeline
            source = self.source
            self._traits = {
                "source": source.kind,
                "batch_size": source.batch_size,
                "elements": source.elements(),
                "is_per_worker": source.is_per_worker(),
            }
        return self._traits


def _other_data(received: str, expected: str) -> ValueError:
    return ValueError(
        f"A loop that resumes, or joins others, draws other data than before. Received: {received}. Expected: "
        f"{expected}. Create the datasets before the loop, alike in all processes, and draw from them in the same "
        "order in each epoch, by the epochs and batches of the loop."
    )
