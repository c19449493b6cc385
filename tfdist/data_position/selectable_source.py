"""Datasets that can be built again for a part of their batches: the streams of rows are those of the checkpoint."""

from typing import Any

from tfdist.data_position.dataset_source import DatasetSource
from tfdist.data_position.position import Json
from tfdist.tensorflow_internals.batch_selection import selectable
from tfdist.tensorflow_internals.distributed_datasets import distributed_alike


class SelectableSource(DatasetSource):
    """A dataset of `tfdist.data`.

    Which rows a batch consists of depends on the number of streams, and its default on the number of workers. After a
    restart with other workers the training resumes with the streams of the checkpoint.
    """

    def order(self, drawn: int | None) -> Json:
        return {**super().order(drawn), "streams": self._streams}

    def restore(self, order: Json, batches: int | None, within_epoch: bool) -> None:
        super().restore(order, batches, within_epoch)
        original = selectable(self.dataset)
        if original is not None and order.get("streams", self._streams) != self._streams:
            self.dataset = distributed_alike(self.dataset, original.select(streams=order["streams"]))

    @property
    def _streams(self) -> int:
        original = selectable(self.dataset)
        return 1 if original is None else original.selection.streams


def is_selectable(dataset: Any) -> bool:
    """Whether a dataset, plain or distributed, can be built again for a part of its batches."""
    return selectable(dataset) is not None
