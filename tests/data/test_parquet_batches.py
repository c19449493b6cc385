"""Batches of Parquet files in one process: each row once, as tensors of its column's type, from any step on."""

import gc
import io
import pickle

import keras
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf
from recovered_runs import run

from tfdist.data import from_parquet
from tfdist.launch.function_call import function_pickling
from tfdist.strategies import MirroredStrategy, ModelParallelStrategy, Pipeline

pytestmark = pytest.mark.usefixtures("cpus")
ROWS_OF_FILES = (5, 0, 13, 3, 1)  # 22 rows, as many as the trainings of `recovered_runs` expect


def write(folder, columns=None, rows_of_files=ROWS_OF_FILES):
    """Writes files with ids from 1 on; `columns` returns further columns of ids."""
    folder.mkdir(exist_ok=True)
    first = 1
    for number, rows in enumerate(rows_of_files):
        ids = np.arange(first, first + rows)
        table = pa.table({"id": ids, **({} if columns is None else columns(ids))})
        pq.write_table(table, folder / f"part-{number}.parquet", row_group_size=4)
        first += rows
    return from_parquet(folder)


@pytest.fixture
def ids(tmp_path):
    return write(tmp_path / "ids")


def batches_of(dataset):
    return [batch.tolist() for batch in dataset.as_numpy_iterator()]


def reference(rows, size, streams):
    """Which ids each batch has, by a loop over single rows: row t is of stream t modulo their number."""
    sizes = [len(range(stream, rows, streams)) for stream in range(streams)]
    nexts = [sum(sizes[:stream]) for stream in range(streams)]
    found = [[] for _ in range(-(-rows // size))]
    for row in range(rows):
        found[row // size].append(1 + nexts[row % streams])
        nexts[row % streams] += 1
    return [sorted(batch) for batch in found]


@pytest.mark.parametrize("streams", [1, 3, 30, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize("size", [1, 6, 100, pytest.param(4, marks=pytest.mark.long)])
def test_batches_take_the_next_rows_of_every_stream(ids, size, streams):
    dataset = ids.dataset(size, features="id", streams=streams)
    assert [sorted(batch) for batch in batches_of(dataset)] == reference(22, size, streams)
    assert int(dataset.cardinality()) == -(-22 // size)


@pytest.mark.parametrize("replicas", [(1, 1), (1, 2), (3,), (2, 1, 1), (1,) * 9])
@pytest.mark.parametrize("size", [5, pytest.param(4, marks=pytest.mark.long), pytest.param(7, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "options",
    [{"streams": 2}, {"streams": 3, "shuffle": 6, "seed": 2}, pytest.param({"streams": 1}, marks=pytest.mark.long)],
    ids=str,
)
def test_parts_of_workers_are_the_global_batches(ids, replicas, size, options):
    whole = batches_of(ids.dataset(size, features="id", **options))
    parts = [
        batches_of(ids.dataset(size, features="id", **options).select(replicas_of_workers=replicas, rank=rank))
        for rank in range(len(replicas))
    ]
    assert {len(part) for part in parts} == {len(whole)}
    assert [sum(batch, []) for batch in zip(*parts, strict=True)] == whole


def test_without_streams_rows_come_in_the_order_of_the_files(ids):
    assert sum(batches_of(ids.dataset(4, features="id")), []) == list(range(1, 23))


@pytest.mark.parametrize("shuffle", [1, 6, True])
def test_epochs_have_each_row_once_in_another_order_that_a_seed_repeats(ids, shuffle):
    def epochs():
        dataset = ids.dataset(4, features="id", shuffle=shuffle, seed=5, streams=2)
        return [sum(batches_of(dataset), []) for _ in range(3)]

    first = epochs()
    assert [sorted(epoch) for epoch in first] == [list(range(1, 23))] * 3
    assert first[0] != first[1] != first[2]
    assert epochs() == first


def test_later_batches_are_found_without_reading_earlier_ones(ids, monkeypatch):
    def make():
        return ids.dataset(4, features="id", shuffle=6, seed=5)

    whole = batches_of(make())
    read = []
    stock = type(ids._source).read
    monkeypatch.setattr(
        type(ids._source), "read", lambda self, block, names: read.append(block) or stock(self, block, names)
    )
    assert batches_of(make().skipped(4)) == whole[4:]
    assert 0 < len(read) < len(ids.rows_of_blocks)


def test_a_last_batch_may_be_left_out_and_sizes_are_static_then(ids):
    dataset = ids.dataset(4, features="id", drop_remainder=True, streams=2)
    assert dataset.element_spec.shape == [4]
    assert len(batches_of(dataset)) == 5


def test_several_devices_of_a_process_take_each_row_once(ids, cpus):
    distributed = MirroredStrategy(cpus[:2]).experimental_distribute_dataset(ids.dataset(6, features="id", streams=2))
    seen = [sorted(np.concatenate([part.numpy() for part in batch.values])) for batch in distributed]
    assert seen == reference(22, 6, 2)


@pytest.mark.parametrize("options", [{}, {"shuffle": 6}], ids=["in order", "shuffled"])
@pytest.mark.parametrize(
    "after", [4, 8, pytest.param(1, marks=pytest.mark.long), pytest.param(6, marks=pytest.mark.long)]
)
def test_an_interrupted_training_resumes_where_it_was(ids, tmp_path, options, after):
    def make(streams=2):
        return ids.dataset(4, features="id", streams=streams, **options)

    whole = run(make, tmp_path / "whole")
    begun = run(make, tmp_path / "cut", after + 1)
    # The streams are those of the checkpoint, also where another number is the default now.
    assert begun[:after] + run(lambda: make(3), tmp_path / "cut") == whole


def test_functions_with_random_numbers_resume_with_theirs(ids, tmp_path):
    def make():
        def noisy(numbers):
            return numbers + 100 * tf.random.uniform(tf.shape(numbers), 0, 9, tf.int64, seed=3)

        return ids.dataset(4, features="id", shuffle=6).map(noisy)

    whole = run(make, tmp_path / "whole")
    assert run(make, tmp_path / "cut", 5)[:4] + run(make, tmp_path / "cut") == whole


def test_handles_are_sent_to_workers_without_rows(ids):
    file = io.BytesIO()
    function_pickling.dump(lambda: ids, file, tensors=False)
    assert len(file.getvalue()) < 10_000
    copy = pickle.loads(file.getvalue())()
    assert copy.num_rows == 22 and copy.columns == ["id"]
    assert batches_of(copy.dataset(9, features="id")) == batches_of(ids.dataset(9, features="id"))


def test_a_closed_handle_says_so(ids):
    with ids:
        pass
    with pytest.raises(RuntimeError, match="was closed"):
        ids.dataset(4)


def test_fit_takes_features_labels_and_weights(tmp_path):
    data = write(tmp_path / "xy", lambda ids: {"x": ids * 0.5, "y": ids % 2, "w": ids * 1.0})
    dataset = data.dataset(8, features=["id", "x"], label="y", weight="w")
    x, y, w = next(iter(dataset))
    assert x.dtype == tf.float64 and x.shape == [8, 2] and y.dtype == tf.int64 and w.numpy().tolist() == [*range(1, 9)]
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    assert model.fit(dataset, verbose=0).history["loss"]
    assert sorted(data.dataset(3).element_spec) == ["id", "w", "x", "y"]
    assert sorted(data.dataset(3, label="y").element_spec[0]) == ["id", "w", "x"]


def test_files_must_exist_be_parquet_and_have_the_same_columns(tmp_path):
    with pytest.raises(FileNotFoundError, match="no Parquet files"):
        from_parquet(tmp_path / "nothing")
    (tmp_path / "text.parquet").write_text("text")
    with pytest.raises(ValueError, match="is not Parquet"):
        from_parquet(tmp_path / "text.parquet")
    pq.write_table(pa.table({"id": [1]}), tmp_path / "a")
    pq.write_table(pa.table({"id": [1.0]}), tmp_path / "b")
    with pytest.raises(ValueError, match="column 'id' double instead of int64"):
        from_parquet([tmp_path / "a", tmp_path / "b"])


def test_data_that_changes_after_it_was_counted_is_an_error(tmp_path):
    data = write(tmp_path / "ids")
    pq.write_table(pa.table({"id": np.arange(3)}), tmp_path / "ids" / "part-0.parquet")
    with pytest.raises(tf.errors.OpError, match="has changed since the driver counted"):
        batches_of(data.dataset(4, features="id"))
    (tmp_path / "ids" / "part-0.parquet").unlink()
    with pytest.raises(tf.errors.OpError, match="cannot be read"):
        batches_of(data.dataset(4, features="id"))


def test_a_dataset_keeps_its_files(tmp_path):
    from tfdist.data.parquet_files import data_in_store

    def put(path):
        write(type(tmp_path)(path))

    dataset = data_in_store(tmp_path, put, keep=False, engine="a test").dataset(9, features="id")
    gc.collect()
    assert sum(batches_of(dataset), []) == list(range(1, 23))


def test_no_rows_are_no_batches(tmp_path):
    data = write(tmp_path / "none", rows_of_files=(0,))
    assert batches_of(data.dataset(4, features="id", shuffle=True, seed=1, streams=2)) == []


def test_stages_draw_the_batches_of_one_process(tmp_path, cpus):
    data = write(tmp_path / "xy", lambda ids: {"x": ids * 0.1, "y": ids * 0.2})

    def trained(strategy):
        with strategy.scope():
            model = keras.Sequential([keras.Input([1]), keras.layers.Dense(2, "relu"), keras.layers.Dense(1)])
            model.set_weights([np.full(weight.shape, 0.5) for weight in model.get_weights()])
            model.compile(keras.optimizers.SGD(0.01), "mse")
        model.fit(data.dataset(4, features=["x"], label="y", shuffle=6, seed=1), verbose=0, epochs=2)
        return model.get_weights()

    for ours, theirs in zip(
        trained(ModelParallelStrategy(cpus[:2], pipeline=Pipeline(stages=2))),
        trained(tf.distribute.get_strategy()),
        strict=True,
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)  # a dozen updates of sums that associate differently
