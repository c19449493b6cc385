"""Batches of loaders are converted as Keras does."""

import numpy as np
import pytest
import tensorflow as tf
import torchdata_stand_in
from optional_packages import require

from tfdist.keras_internals.loader_adapters import draw_batches_from, loader_adapter

pytestmark = pytest.mark.usefixtures("cpus")
ROWS, BATCH = 7, 3


def sample(number):
    row = np.float32([number / 9, 1 / (number + 1)])
    return {"a": row, "b": (np.int32(number), np.uint8([number]))}, np.float64([number]), np.float32(number % 3)


def assert_as_stock(data):
    """Compares types, shapes and values, also of the smaller last batch."""
    adapter = loader_adapter(data)
    stock = adapter.get_tf_dataset()
    draw_batches_from(adapter, lambda: iter(data))
    own = adapter.get_tf_dataset()
    assert own.element_spec == stock.element_spec
    batches = [[tf.nest.flatten(batch, expand_composites=True) for batch in dataset] for dataset in (own, stock)]
    assert len(batches[0]) == len(batches[1]) == -(-ROWS // BATCH)
    for pair in zip(*batches, strict=True):
        for one, other in zip(*pair, strict=True):
            assert one.dtype == other.dtype and np.array_equal(one, other)


def test_batches_of_grain():
    require("grain")
    import grain

    assert_as_stock(grain.MapDataset.source([sample(number) for number in range(ROWS)]).batch(BATCH))


def test_sparse_batches_of_grain():
    require("grain", "scipy")
    import grain
    import scipy.sparse

    rows = grain.MapDataset.source([sample(number)[0]["a"] for number in range(ROWS)])
    assert_as_stock(rows.batch(BATCH).map(scipy.sparse.csr_matrix))


def test_batches_of_torch(monkeypatch):
    torch, loader = torchdata_stand_in.install(monkeypatch)
    samples = [(torch.tensor(np.float32([number, 1])), torch.tensor(number)) for number in range(ROWS)]
    assert_as_stock(loader(samples, batch_size=BATCH))


def test_other_data_has_no_adapter():
    assert loader_adapter(np.ones(3)) is None and loader_adapter(object()) is None
