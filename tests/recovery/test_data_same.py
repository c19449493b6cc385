"""A run goes on with the data of the one before: other elements or batches are refused, other shares are warned of."""

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
from tfdist.keras_internals import data_source
from tfdist.keras_internals.element_description import described, first_difference
from tfdist.keras_internals.pipeline_traits import batch_size, is_each_workers_own
from tfdist.strategies import MirroredStrategy

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
def test_other_elements_are_refused(before, now, message):
    strategy = tf.distribute.get_strategy()
    start = train(lambda strategy: endless(**before), strategy).positions[2]
    with pytest.raises(ValueError, match=message):
        train(lambda strategy: endless(**now), strategy, start)


def test_another_batch_size_for_another_number_of_workers():
    strategy = tf.distribute.get_strategy()
    start = replace(train(lambda strategy: endless(), strategy).positions[2], same_workers=False)
    with pytest.warns(RuntimeWarning, match="The batch size is another one than before .* Received: 2. Expected: 4"):
        rest = train(lambda strategy: endless(2), strategy, start)
    assert rest.ids == [[5, 6], [7, 8]] and rest.positions[-1].position["batch_size"] == 2
    with pytest.raises(ValueError, match="in its element 0"):
        train(lambda strategy: endless(dtype="float32"), strategy, start)


def test_the_pipeline_is_read_once_a_fit(monkeypatch):
    read = []
    monkeypatch.setattr(data_source, "is_each_workers_own", lambda dataset: read.append(dataset) or False)
    run = train(lambda strategy: endless(), tf.distribute.get_strategy())
    assert len(run.positions) > 4 and len(read) == 1


def test_data_of_the_same_kind_is_taken():
    strategy = tf.distribute.get_strategy()
    whole = train(lambda strategy: endless(), strategy)
    assert train(lambda strategy: endless(), strategy, whole.positions[2]).ids == whole.ids[2:]


def test_elements_are_described_alike_for_any_number_of_replicas(cpus):
    data = tf.data.Dataset.from_tensor_slices({"image": np.ones([12, 3], "f4"), "label": np.ones([12], "i8")})
    data = data.batch(6, drop_remainder=True)
    distributed = MirroredStrategy(cpus[:2]).experimental_distribute_dataset(data)
    assert described(distributed.element_spec) == described(data.element_spec)
    assert described(data.element_spec) == [["image", "float32", [3]], ["label", "int64", []]]
    assert batch_size(distributed) == batch_size(data) == 6


def test_sizes_that_were_only_seen_are_not_compared():
    one, other = (described(tf.TensorSpec([None, size]), with_sizes=False) for size in (5, 7))
    assert first_difference(one, other) is None
    assert first_difference(one, described(tf.TensorSpec([None, 5, 1]))) is not None
    assert first_difference(one, described(tf.TensorSpec(None))) is None


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
def test_data_that_each_worker_has_for_itself_is_known(make, is_own):
    assert is_each_workers_own(make()) == is_own


@pytest.fixture
def own(cpus):
    strategy = MirroredStrategy(cpus[:2])

    def make(strategy):
        return {"x": strategy.distribute_datasets_from_function(lambda context: dataset().batch(2)), "epochs": 2}

    return strategy, make, train(make, strategy)


def test_a_pass_that_is_shared_out_anew_is_warned_of(own):
    strategy, make, whole = own
    start = replace(whole.positions[2], same_workers=False)
    with pytest.warns(RuntimeWarning, match="shared out among another number of workers.*may come twice"):
        train(make, strategy, start)

    def shorter(strategy):
        return {"x": strategy.distribute_datasets_from_function(lambda context: dataset().batch(4)), "epochs": 2}

    with pytest.warns(RuntimeWarning, match="shared out among another number"):
        rest = train(shorter, strategy, start)
    assert [step[:2] for step in rest.steps] == [(0, 2), (1, 0), (1, 1), (1, 2)], "as many steps as there are now"
    numbers = [run.positions[-1].position["num_batches"] for run in (whole, rest)]
    assert numbers == [11, 6], "batches of one replica each"


def test_a_checkpoint_of_more_workers_tells_of_it(tmp_path):
    """What one worker has saved is saved again as that of two, the second of which has nothing of its own."""

    def own():
        return with_policy(FILE, dataset()).batch(BATCH)

    run(own, tmp_path / "one", 3)
    checkpoint = CheckpointStore(tmp_path / "one", keep=3).newest()[0]
    notes = [checkpoint.of_rank(0), Shard({}, checkpoint.of_rank(0).notes)]
    parts = {"world": 2, "facts": checkpoint.facts}
    store, shared = CheckpointStore(tmp_path / "two", keep=3), checkpoint.shared()
    second = threading.Thread(target=lambda: store.save(0, "a", rank=1, own=notes[1], shared=None, **parts))
    second.start()
    store.save(0, "a", rank=0, own=notes[0], shared=shared, **parts)
    second.join()
    with pytest.warns(RuntimeWarning, match="shared out among another number of workers"):
        run(own, tmp_path / "two")


def test_nothing_is_said_where_it_does_not_matter(own):
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


def test_a_position_keeps_what_is_compared():
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
