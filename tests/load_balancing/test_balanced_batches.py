"""Which datasets may be divided by shares, and the check that each row is computed once."""

import logging
from types import SimpleNamespace

import pytest
import tensorflow as tf

from tfdist.training import worker_batches
from tfdist.training.worker_batches import SharedRows, complete_batches

pytestmark = pytest.mark.usefixtures("cpus")


def lists(dataset):
    return [batch.tolist() for batch in dataset.as_numpy_iterator()]


@pytest.mark.parametrize("drop_remainder", [False, True])
def test_every_device_of_a_worker_draws_each_batch(drop_remainder):
    batches = tf.data.Dataset.range(7).batch(3, drop_remainder=drop_remainder)
    one, two = complete_batches(batches, 1, 2, 0), complete_batches(batches, 2, 2, 0)
    assert lists(one) == lists(batches)
    assert lists(two) == [batch for batch in lists(batches) for _ in range(2)]
    assert (int(one.cardinality()), int(two.cardinality())) == (len(lists(batches)), 2 * len(lists(batches)))
    assert two.element_spec == batches.element_spec
    assert int(complete_batches(batches.repeat(), 2, 2, 0).cardinality()) == tf.data.INFINITE_CARDINALITY
    filtered = batches.filter(lambda batch: batch[0] >= 0)
    assert int(complete_batches(filtered, 2, 2, 0).cardinality()) == tf.data.UNKNOWN_CARDINALITY


def test_files_are_read_by_all_workers_with_one_warning(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(worker_batches, "_has_warned_of_files", False)
    (tmp_path / "rows").write_text("one\ntwo\n")
    batches = tf.data.TextLineDataset([str(tmp_path / "rows")]).batch(2)
    with caplog.at_level(logging.WARNING, logger="tfdist"):
        assert lists(complete_batches(batches, 1, 2, 0)) == [[b"one", b"two"]]
        complete_batches(batches, 1, 2, 0)
        complete_batches(batches, 1, 2, 1)  # another worker
    assert [record.message for record in caplog.records] == [
        "Each worker reads all files, because load_balancing and shares divide the rows of common batches. Set "
        "AutoShardPolicy.DATA in the options of the dataset to say so."
    ]


@pytest.mark.parametrize("rows", [15, 17])
def test_batches_that_differ_between_workers_end_the_step(rows):
    shared = SimpleNamespace(_rows=16)
    SharedRows.check(shared, tf.constant([0.5, 8.0, 16.0]))
    with pytest.raises(tf.errors.InvalidArgumentError, match="The workers have drawn different batches"):
        SharedRows.check(shared, tf.constant([0.5, 8.0, float(rows)]))
