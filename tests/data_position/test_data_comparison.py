"""A resumed run needs the same data: other elements or batches are an error, other sharding is a warning."""

import threading
import warnings
from dataclasses import replace

import keras
import numpy as np
import pytest
import tensorflow as tf
from data_runs import BATCH, IDS, dataset, train
from recovered_runs import run

from tfdist.checkpoint import CheckpointStore, Shard
from tfdist.data_position import dataset_source
from tfdist.data_position.position import describe_elements, first_difference
from tfdist.strategies import MirroredStrategy
from tfdist.tensorflow_internals.input_pipeline import batch_size, is_per_worker

pytestmark = pytest.mark.usefixtures("cpus")

FILE = tf.data.experimental.AutoShardPolicy.FILE
OFF = tf.data.experimental.AutoShardPolicy.OFF


def endless(size=BATCH, dtype="int64", parts=1, width=None):
    elements = [tf.cast(IDS, dtype) if width is None else tf.ones([len(IDS), width], dtype)] * parts
    data = tf.data.Dataset.from_tensor_slices(tuple(elements) if parts > 1 else elements[0])
    return {"x": data.repeat().batch(size), "steps_per_epoch": 4, "epochs": 1}


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        ({}, {"size": 5}, "in its batch size. Received: 5. Expected: 4"),
        ({}, {"dtype": "float32"}, r"in its element 0. Received: float32 of shape \(…\). Expected: int64 of shape"),
        (
            {"width": 2},
            {"width": 3},
            r"element 0. Received: int64 of shape \(…, 3\). Expected: .*\(…, 2\)",
        ),
        ({}, {"parts": 2}, r"element 0. Received: int64.*Expected: int64|element 1. Received: .*Expected: none"),
    ],
)
def test_other_elements_are_rejected(before, now, message):
    strategy = tf.distribute.get_strategy()
    start = train(lambda strategy: endless(**before), strategy).positions[2]
    with pytest.raises(ValueError, match=message):
        train(lambda strategy: endless(**now), strategy, start)


def test_another_batch_size_for_another_number_of_workers():
    strategy = tf.distribute.get_strategy()
    start = replace(train(lambda strategy: endless(), strategy).positions[2], same_workers=False)
    with pytest.warns(RuntimeWarning, match="number of workers have changed.*Received: 2. Expected: 4"):
        rest = train(lambda strategy: endless(2), strategy, start)
    assert rest.ids == [[5, 6], [7, 8]] and rest.positions[-1].position["batch_size"] == 2
    with pytest.raises(ValueError, match="in its element 0"):
        train(lambda strategy: endless(dtype="float32"), strategy, start)


def test_the_pipeline_is_read_once_a_fit(monkeypatch):
    read = []
    monkeypatch.setattr(dataset_source, "is_per_worker", lambda dataset: read.append(dataset) or False)
    run = train(lambda strategy: endless(), tf.distribute.get_strategy())
    assert len(run.positions) > 4 and len(read) == 1


def test_data_of_the_same_kind_is_accepted():
    strategy = tf.distribute.get_strategy()
    whole = train(lambda strategy: endless(), strategy)
    assert train(lambda strategy: endless(), strategy, whole.positions[2]).ids == whole.ids[2:]


def test_element_descriptions_are_equal_for_any_number_of_replicas(cpus):
    data = tf.data.Dataset.from_tensor_slices({"image": np.ones([12, 3], "f4"), "label": np.ones([12], "i8")})
    data = data.batch(6, drop_remainder=True)
    distributed = MirroredStrategy(cpus[:2]).experimental_distribute_dataset(data)
    assert describe_elements(distributed.element_spec) == describe_elements(data.element_spec)
    assert describe_elements(data.element_spec) == [["image", "float32", [3]], ["label", "int64", []]]
    assert batch_size(distributed) == batch_size(data) == 6


def test_inexact_sizes_are_not_compared():
    one, other = (describe_elements(tf.TensorSpec([None, size]), is_exact=False) for size in (5, 7))
    assert first_difference(one, other) is None
    assert first_difference(one, describe_elements(tf.TensorSpec([None, 5, 1]))) is not None
    assert first_difference(one, describe_elements(tf.TensorSpec(None))) is None


def with_policy(policy, data):
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = policy
    return data.with_options(options)


def read_within(data):
    return data.map(tf.strings.as_string).interleave(tf.data.TFRecordDataset)


@pytest.mark.parametrize(
    ("make", "is_own"),
    [
        (lambda: dataset(), False),
        (lambda: with_policy(FILE, dataset()), True),
        (lambda: tf.data.TextLineDataset(["one", "two"]).shuffle(9).batch(2), True),
        (lambda: read_within(dataset()), True),
        (lambda: with_policy(tf.data.experimental.AutoShardPolicy.DATA, read_within(dataset())), False),
        (lambda: with_policy(OFF, dataset()), False),
        (lambda: with_policy(OFF, dataset().shard(2, 0)), True),
    ],
)
def test_per_worker_data_is_recognized(make, is_own):
    assert is_per_worker(make()) == is_own


@pytest.fixture
def own(cpus):
    strategy = MirroredStrategy(cpus[:2])

    def make(strategy):
        return {"x": strategy.distribute_datasets_from_function(lambda context: dataset().batch(2)), "epochs": 2}

    return strategy, make, train(make, strategy)


def test_resharded_pass_is_a_warning(own):
    strategy, make, whole = own
    start = replace(whole.positions[2], same_workers=False)
    with pytest.warns(RuntimeWarning, match="number of workers has changed.*may be seen twice"):
        train(make, strategy, start)

    def shorter(strategy):
        return {"x": strategy.distribute_datasets_from_function(lambda context: dataset().batch(4)), "epochs": 2}

    with pytest.warns(RuntimeWarning, match="number of workers has changed"):
        rest = train(shorter, strategy, start)
    assert [step[:2] for step in rest.steps] == [(0, 2), (1, 0), (1, 1), (1, 2)], "as many steps as there are now"
    numbers = [run.positions[-1].position["num_batches"] for run in (whole, rest)]
    assert numbers == [11, 6], "batches of one replica each"


def test_checkpoint_of_more_workers_is_a_warning(tmp_path):
    """What one worker has saved is saved again as that of two, the second of which has nothing of its own."""

    def own():
        return with_policy(FILE, dataset()).batch(BATCH)

    run(own, tmp_path / "one", 3)
    checkpoint = CheckpointStore(tmp_path / "one", keep=3).newest()[0]
    notes = [checkpoint.read_rank(0), Shard({}, checkpoint.read_rank(0).metadata)]
    parts = {"num_ranks": 2, "metadata": checkpoint.metadata}
    store, shared = CheckpointStore(tmp_path / "two", keep=3), checkpoint.read_shared()
    second = threading.Thread(
        target=lambda: store.save(0, "a", rank=1, rank_shard=notes[1], shared_shard=None, **parts)
    )
    second.start()
    store.save(0, "a", rank=0, rank_shard=notes[0], shared_shard=shared, **parts)
    second.join()
    with pytest.warns(RuntimeWarning, match="number of workers has changed"):
        run(own, tmp_path / "two")


def test_no_warning_if_no_sample_is_affected(own):
    strategy, make, whole = own
    [(_, at_end), *_] = whole.ends
    common = train(lambda strategy: {"x": dataset().batch(BATCH), "epochs": 2}, strategy)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        train(make, strategy, whole.positions[2])
        train(make, strategy, replace(at_end, same_workers=False))
        train(
            lambda strategy: {"x": dataset().batch(BATCH), "epochs": 2},
            strategy,
            replace(common.positions[2], same_workers=False),
        )


def test_position_holds_what_is_compared():
    class Data(keras.utils.PyDataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return (np.ones([4, 3], "f4"),)

    strategy = tf.distribute.get_strategy()
    position = train(lambda strategy: {"x": Data(), "epochs": 1}, strategy).positions[1].position
    assert position["elements"] == [["0", "float32", [None]]] and position["batch_size"] is None
    arrays = train(lambda strategy: {"x": IDS, "batch_size": 4, "epochs": 1}, strategy).positions[1].position
    assert arrays["batch_size"] == 4
