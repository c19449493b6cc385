"""NumPy arrays and tensors: repeats the order in which Keras shuffles them."""

import secrets
from collections.abc import Sequence
from typing import Any

from tfdist.data_position.dataset_source import DatasetSource
from tfdist.data_position.position import Json
from tfdist.keras_internals.epoch_iterator import ARRAYS, shuffle_argument
from tfdist.tensorflow_internals.runtime import global_seed, global_seed_for_functions

_SEEDS = 1 << 31


class ArraySource(DatasetSource):
    """NumPy arrays and tensors.

    With a global seed of TensorFlow, Keras' shuffle gives every epoch the same order, derived from that seed. Without
    one the orders differ and cannot be repeated: then every epoch's dataset is traced with a seed chosen here.
    """

    kind = ARRAYS
    needs_unused_iterators = False

    def __init__(self, adapter: Any, dataset: Any, strategy: Any) -> None:
        super().__init__(adapter, dataset, strategy)
        self._shuffle = shuffle_argument(adapter)
        self._seed = global_seed()
        self._own_seed = secrets.randbelow(_SEEDS) if self._shuffle and self._seed is None else None
        self._tracks_position = False

    @property
    def batch_size(self) -> int | None:
        return self.adapter.batch_size

    def track_position(self, steps_per_epoch: int | None) -> None:
        self._tracks_position = True

    def order(self, drawn: int | None) -> Json:
        return {"seed": self._seed if self._shuffle else None, "own_seed": self._own_seed}

    def check(self, order: Json, drawn: Sequence[int], replay: bool) -> None:
        if (order == {"seed": None, "own_seed": None}) == bool(self._shuffle):
            raise ValueError(
                f"`shuffle` differs from that of the checkpoint. Received: shuffle={self._shuffle!r}. "
                f"Expected: `shuffle={not self._shuffle}`, with which the training began."
            )

    def begin_epoch(self, number: int) -> None:
        if self._tracks_position and self._own_seed is not None:
            self._trace_with((self._own_seed + number) % _SEEDS)

    def replay_iterators(self, drawn: Sequence[int]) -> int:
        return 0

    def restore(self, order: Json, batches: int | None, within_epoch: bool) -> None:
        if order["seed"] is not None and order["seed"] != self._seed:
            self._trace_with(order["seed"])
        self._seed, self._own_seed = order["seed"], order["own_seed"]

    def _trace_with(self, seed: int) -> None:
        with global_seed_for_functions(seed):
            self.dataset = self.strategy.experimental_distribute_dataset(self.adapter.get_tf_dataset())
