"""Rows in memory: what TensorFlow does with batches does not change them, and several iterators share them."""

import concurrent.futures
import json
import threading
import warnings

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf

from tfdist.data import from_parquet
from tfdist.data.batch_reader import BatchReader
from tfdist.data.block_source import BlockSource
from tfdist.data.row_order import BatchRows
from tfdist.data.tensor_layout import layout_of

pytestmark = pytest.mark.usefixtures("cpus")


def test_results_of_map_do_not_overwrite_rows_of_the_next_epoch(tmp_path):
    values = np.arange(64, dtype=np.float32)
    pq.write_table(pa.table({"x": values}), tmp_path / "rows.parquet")
    dataset = from_parquet(tmp_path / "rows.parquet").dataset(32, features="x").map(tf.negative)
    for _ in range(3):
        np.testing.assert_array_equal(np.concatenate([*dataset.as_numpy_iterator()]), -values)


class _Gated(BlockSource):
    """Blocks of one row, the number of the block, which are read once a gate is open."""

    schema = pa.schema({"x": pa.int64()})
    rows_of_blocks = (1,) * 12

    def __init__(self):
        self.gate = threading.Event()

    def read(self, block, columns):
        assert self.gate.wait(60)
        return pa.table({"x": [block]})

    def name_of(self, block):
        return f"block {block}"


def test_an_iterator_that_waits_is_not_disturbed_by_another_one_elsewhere(monkeypatch):
    source, submitted, submit = _Gated(), threading.Semaphore(0), BatchReader._submit
    monkeypatch.setattr(BatchReader, "_submit", lambda self, window: [submit(self, window), submitted.release()][0])
    reader = BatchReader(source, layout_of(source, "x", None, None, None, None, None).tensors, 0)
    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        reads = []
        for number in (0, 4, 8):  # the first one keeps both loading threads busy
            reads.append(threads.submit(reader.read, BatchRows(12, 1, 1), 0, number, number + 1))
            assert submitted.acquire(timeout=60) and submitted.acquire(timeout=60)
        source.gate.set()
        assert [read.result(60)[0].tolist() for read in reads] == [[0], [4], [8]]


def test_workers_without_a_common_seed_are_warned(tmp_path, monkeypatch):
    pq.write_table(pa.table({"x": np.arange(4)}), tmp_path / "rows.parquet")
    data = from_parquet(tmp_path / "rows.parquet")
    cluster = {"cluster": {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(cluster))
    tf.random.set_seed(None)  # other tests of this process have set one
    with pytest.warns(RuntimeWarning, match="Workers shuffle rows in different orders"):
        data.dataset(2, features="x", shuffle=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data.dataset(2, features="x", shuffle=True, seed=1)
        data.dataset(2, features="x")
