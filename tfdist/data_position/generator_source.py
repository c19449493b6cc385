"""Data without a position: Python generators, and datasets that the workers of parameter servers create."""

from collections.abc import Sequence
from typing import Any

from tfdist.data_position.dataset_source import DatasetSource
from tfdist.data_position.position import Json
from tfdist.keras_internals.epoch_iterator import data_kind


class GeneratorSource(DatasetSource):
    """A Python generator, or data of an unknown adapter: its batches can only be counted."""

    needs_unused_iterators = False
    has_exact_spec = False

    @property
    def kind(self) -> str:  # type: ignore[override]
        return data_kind(self.adapter)

    def track_position(self, steps_per_epoch: int | None) -> None:
        """There is nothing to prepare."""

    def order(self, drawn: int | None) -> Json:
        return {}

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
