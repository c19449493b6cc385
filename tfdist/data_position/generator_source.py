"""Data without a position: Python generators, and datasets that the workers of parameter servers create."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

from tfdist.data_position.dataset_source import DatasetSource
from tfdist.data_position.position import Json
from tfdist.data_position.python_randomness import global_states, set_global_states, states_equal
from tfdist.data_position.read_ahead import ReadAhead
from tfdist.keras_internals.epoch_iterator import GENERATOR, data_kind
from tfdist.utils.json_state import from_text


class GeneratorSource(DatasetSource):
    """A Python generator, or data of an unknown adapter: its batches can only be counted.

    A Python generator may draw from the global generators of NumPy and Python, in a thread that reads ahead. So its
    seen batches are drawn again from the states when the pass began, and the next one from the states before it.
    """

    needs_unused_iterators = False
    has_exact_spec = False

    def __init__(self, adapter: Any, dataset: Any, strategy: Any) -> None:
        super().__init__(adapter, dataset, strategy)
        self._batches: Callable[[], Iterator[Any]] | None = None  # None: no Python generator
        if self.kind == GENERATOR:
            # Over the batches that Keras has drawn to see their shapes, and over all others.
            stock: Callable[[], Iterator[Any]] = adapter.generator
            self._batches, adapter.generator = stock, lambda: self._draw(stock)
        self._rest: tuple[int, Iterator[Any]] | None = None
        self._tracks_position = False
        self._at_begin: Json = {}
        self._before_next: Json = {}
        self._ahead = ReadAhead()

    @property
    def kind(self) -> str:  # type: ignore[override]
        return data_kind(self.adapter)

    def track_position(self, steps_per_epoch: int | None) -> None:
        self._tracks_position = True

    def order(self, drawn: int | None) -> Json:
        if self._batches is None or drawn is None:
            return {}
        return {"at_begin": self._at_begin, "before": self._ahead.before(drawn)}

    def check(self, order: Json, drawn: Sequence[int], replay: bool) -> None:
        if not any(drawn):
            return
        if not replay:
            raise RuntimeError(
                f"Training cannot resume: its data is a {self.kind}, which cannot be resumed in the middle. Received: "
                f"{sum(drawn)} batches drawn before the restart. Expected: a tf.data.Dataset, a keras.utils.PyDataset "
                "or arrays. Or allow `replay` (`replay_data=True` of FailureRecovery), which draws and discards the "
                "same number of batches; the generator must then yield the same batches in every run."
            )
        if len(drawn) > 1:
            raise RuntimeError(
                f"The batches of a {self.kind} cannot be counted: {len(drawn)} iterators have drawn from it, each "
                f"reading ahead. Received: {list(drawn)} batches. Expected: one iterator, by `steps_per_epoch` and an "
                "endless generator. Use a tf.data.Dataset or a keras.utils.PyDataset instead."
            )

    def restore(self, order: Json, batches: int | None, within_epoch: bool) -> None:
        """Draws the seen batches now: the caller then restores the states of the random generators."""
        if self._batches is None or batches is None:
            return
        present = global_states()
        set_global_states(order.get("at_begin", {}))
        began, remaining_batches = global_states(), self._batches()
        for _ in islice(remaining_batches, batches):
            pass
        ended = global_states()
        set_global_states(present)
        drawn = {name: state for name, state in ended.items() if not states_equal(began[name], state)}
        before = {name: from_text(state) for name, state in order.get("before", {}).items()}
        self._at_begin, self._before_next, self._rest = began, drawn | before, (batches, remaining_batches)

    def iterator(self) -> Any:
        self._at_begin = global_states()
        self._ahead.clear()
        return super().iterator()

    def iterator_at(self, batches: int) -> Any:
        if self._rest is None:
            return super().iterator_at(batches)
        set_global_states(self._before_next)
        return iter(self.dataset)

    def _draw(self, stock: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Yields the batches of an iterator, in a thread of tf.data."""
        (number, batches), self._rest = self._rest or (0, stock()), None
        while True:
            before = global_states() if self._tracks_position else {}
            try:
                batch = next(batches)
            except StopIteration:
                return
            if self._tracks_position:
                self._ahead.record(number, before, global_states())
            number += 1
            yield batch


class WorkerDatasetSource(GeneratorSource):
    """Endless datasets that the workers of parameter servers create; they have no position.

    Which worker draws how many batches depends on timing; after a restart the datasets start from the beginning.
    """

    kind = "data of workers"

    def check(self, order: Json, drawn: Sequence[int], replay: bool) -> None:
        """There is nothing to compare."""

    def replay_iterators(self, drawn: Sequence[int]) -> int:
        return 0

    def iterator_at(self, batches: int) -> Any:
        return self.iterator()
