"""A `keras.utils.PyDataset` that an epoch iterator draws from."""

import warnings
from collections.abc import Sequence
from typing import Any

from tfdist.keras_internals.data_source import DataSource, Json
from tfdist.keras_internals.py_dataset_view import PyDatasetView


class PyDatasetSource(DataSource):
    """A `keras.utils.PyDataset`; batches are passed over by their numbers, and never made."""

    kind = "keras.utils.PyDataset"
    makes_ahead = False
    tells_of_batches = False

    def __init__(self, adapter: Any, dataset: Any, strategy: Any) -> None:
        super().__init__(adapter, dataset, strategy)
        self._view = PyDatasetView(adapter.py_dataset, adapter.shuffle)
        adapter.py_dataset, adapter.shuffle = self._view, False
        self._first: tuple[int, Any] | None = None

    def follow(self, steps_per_epoch: int | None) -> None:
        """See the base class."""
        self._view.follow()
        batches = self._view.num_batches
        if self.adapter.enqueuer is not None and batches is not None and (steps_per_epoch or batches) < batches:
            warnings.warn(
                "The order of this PyDataset cannot be had again: Keras ends its workers with every epoch, and with "
                "them a pass over the data that is not yet over. After a restart some samples may come twice and "
                f"others not at all. Received: steps_per_epoch={steps_per_epoch} of {batches} batches, with workers. "
                "Expected: `workers=1` without multiprocessing, or whole passes. Leave `steps_per_epoch` out.",
                RuntimeWarning,
                stacklevel=2,
            )

    def order(self, drawn: int | None) -> Json:
        """See the base class."""
        return self._view.order(drawn)

    def check(self, order: Json, drawn: Sequence[int], replay: bool) -> None:
        """See the base class."""
        if order["own"] is not None and not self._view.keeps_state:
            raise ValueError(
                "The checkpoint holds what a PyDataset has told by `get_state`, and this one does not take it. "
                f"Received: {self._view.source_name} without these methods. Expected: `get_state()` and "
                "`set_state(state)`, as before. Give `fit` the data that it had, or begin a new training."
            )

    def begin_epoch(self, number: int) -> None:
        """See the base class."""
        first, self._first = self._first, None
        self._view.begin_pass(*(first or ()))
        if self.adapter.enqueuer is not None:
            # A pass that was left early, as to build the model, has batches in the old one, and perhaps a thread that
            # still takes some.
            view = self._view
            self.adapter.enqueuer = type(self.adapter.enqueuer)(
                view, view.workers, view.use_multiprocessing, view.max_queue_size
            )

    def repeat_iterators(self, drawn: Sequence[int]) -> int:
        """See the base class."""
        return 0

    def restore(self, order: Json, batches: int | None, within_epoch: bool) -> None:
        """See the base class."""
        self._view.restore(order, within_epoch)
        self._first = None if batches is None else (batches, order["random_state"])

    def iterator_at(self, batches: int) -> Any:
        """See the base class."""
        return self.iterator()
