"""What an epoch iterator draws from beside tf.data pipelines, by kind, and which kind it is."""

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tfdist.keras_internals.data_source import DataSource, Json
from tfdist.keras_internals.py_dataset_source import PyDatasetSource
from tfdist.private_symbols import private

_ADAPTERS = "keras.src.trainers.data_adapters"
_Arrays = private(f"{_ADAPTERS}.array_data_adapter:ArrayDataAdapter", "shuffles without a generator that can be saved")
_Dataset = private(f"{_ADAPTERS}.tf_dataset_adapter:TFDatasetAdapter", "holds the data set that was given to `fit`")
_PyDataset = private(f"{_ADAPTERS}.py_dataset_adapter:PyDatasetAdapter", "shuffles in a thread, with `random`")
_Generator = private(f"{_ADAPTERS}.generator_data_adapter:GeneratorDataAdapter", "can be drawn from only once")
_context = private("tensorflow.python.eager.context:context", "holds the seed that functions are traced with")

_SEEDS = 1 << 31


class ArraySource(DataSource):
    """NumPy arrays and tensors.

    With a global seed of TensorFlow, Keras' shuffle gives every epoch the same order, from that seed. Without one the
    orders differ and come from nowhere: then every epoch's data set is traced with a seed of its own.
    """

    kind = "arrays"
    makes_ahead = False

    def __init__(self, adapter: Any, dataset: Any, strategy: Any) -> None:
        super().__init__(adapter, dataset, strategy)
        self._seed: int | None = _context()._seed
        self._own_seed = secrets.randbelow(_SEEDS) if adapter._shuffle and self._seed is None else None
        self._follows = False

    @property
    def batch_size(self) -> int | None:
        """See the base class."""
        return self.adapter.batch_size

    def follow(self, steps_per_epoch: int | None) -> None:
        """See the base class."""
        self._follows = True

    def order(self, drawn: int | None) -> Json:
        """See the base class."""
        return {"seed": self._seed if self.adapter._shuffle else None, "own_seed": self._own_seed}

    def check(self, order: Json, drawn: Sequence[int], replay: bool) -> None:
        """See the base class."""
        if (order == {"seed": None, "own_seed": None}) == bool(self.adapter._shuffle):
            raise ValueError(
                f"The data is not shuffled as before the restart. Received: shuffle={self.adapter._shuffle!r}. "
                f"Expected: `shuffle={not self.adapter._shuffle}`, with which the training began."
            )

    def begin_epoch(self, number: int) -> None:
        """See the base class."""
        if self._follows and self._own_seed is not None:
            self._trace((self._own_seed + number) % _SEEDS)

    def repeat_iterators(self, drawn: Sequence[int]) -> int:
        """See the base class."""
        return 0

    def restore(self, order: Json, batches: int | None, within_epoch: bool) -> None:
        """See the base class."""
        if order["seed"] is not None and order["seed"] != self._seed:
            self._trace(order["seed"])
        self._seed, self._own_seed = order["seed"], order["own_seed"]

    def _trace(self, seed: int) -> None:
        with _functions_seeded(seed):
            self.dataset = self.strategy.experimental_distribute_dataset(self.adapter.get_tf_dataset())


class OnceSource(DataSource):
    """A Python generator, or what Keras gives no other hold of: its batches can only be counted."""

    makes_ahead = False
    tells_of_batches = False

    @property
    def kind(self) -> str:  # type: ignore[override]
        """What it is called in a position and in errors."""
        return "generator" if isinstance(self.adapter, _Generator) else type(self.adapter).__name__

    def follow(self, steps_per_epoch: int | None) -> None:
        """See the base class."""

    def order(self, drawn: int | None) -> Json:
        """See the base class."""
        return {}

    def check(self, order: Json, drawn: Sequence[int], replay: bool) -> None:
        """See the base class."""
        if not any(drawn):
            return
        if not replay:
            raise RuntimeError(
                f"Training cannot go on where it stopped: its data is a {self.kind}, which only begins anew. Received: "
                f"{sum(drawn)} batches drawn before the restart. Expected: a tf.data.Dataset, a keras.utils.PyDataset "
                "or arrays. Or allow `replay` (`replay_data=True` of FailureRecovery), which draws and throws away as "
                "many batches; the generator must then yield the same ones in every run."
            )
        if len(drawn) > 1:
            raise RuntimeError(
                f"The batches of a {self.kind} cannot be counted: {len(drawn)} iterators have drawn from it, each "
                f"reading ahead. Received: {list(drawn)} batches. Expected: one iterator, by `steps_per_epoch` and a "
                "generator without an end. Use a tf.data.Dataset or a keras.utils.PyDataset instead."
            )


class WorkersSource(DataSource):
    """Data sets that workers of parameter servers make for themselves: endless, and of no position.

    Who draws how many batches is chance; after a restart the workers' data sets begin anew.
    """

    kind = "data of workers"
    makes_ahead = False
    tells_of_batches = False

    def follow(self, steps_per_epoch: int | None) -> None:
        """See the base class."""

    def order(self, drawn: int | None) -> Json:
        """See the base class."""
        return {}

    def check(self, order: Json, drawn: Sequence[int], replay: bool) -> None:
        """See the base class."""

    def repeat_iterators(self, drawn: Sequence[int]) -> int:
        """See the base class."""
        return 0

    def iterator_at(self, batches: int) -> Any:
        """See the base class."""
        return self.iterator()


def source_of(adapter: Any, dataset: Any, strategy: Any, *, keeps_order: bool = False) -> DataSource:
    """The source behind one of Keras' data adapters.

    Args:
      adapter: Keras' data adapter.
      dataset: what the epoch iterator makes its iterators of: a data set, plain or distributed.
      strategy: the strategy of the model.
      keeps_order: whether only a tf.data pipeline comes in another order every time, as in validation: what is special
        about other data is then left alone.
    """
    kinds: dict[Any, type[DataSource]] = {_Arrays: ArraySource, _Dataset: DataSource, _PyDataset: PyDatasetSource}
    if keeps_order:
        return kinds[_Dataset](adapter, dataset, strategy)
    if getattr(adapter, "is_drawn_by_workers", False):
        return WorkersSource(adapter, dataset, strategy)
    return kinds.get(type(adapter), OnceSource)(adapter, dataset, strategy)


@contextmanager
def _functions_seeded(seed: int) -> Iterator[None]:
    """Gives functions that are traced within the global seed `seed`, and leaves that of the program as it is.

    `tf.random.set_seed` would also begin anew what has been drawn from it.
    """
    before = _context()._seed
    _context()._seed = seed
    try:
        yield
    finally:
        _context()._seed = before
