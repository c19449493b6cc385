"""Iterators over several devices, which share their functions in tests, have data of their own."""

import gc

import tensorflow as tf
from shared_iterator_functions import _traced


def parts(strategy, batch):
    return [part.numpy().tolist() for part in strategy.experimental_local_results(batch)]


def test_iterators_of_one_kind_have_data_of_their_own_and_trace_nothing(cpus):
    strategy = tf.distribute.MirroredStrategy(cpus[:2])

    def iterator(first):
        data = tf.data.Dataset.range(first, first + 8).batch(4, drop_remainder=True)
        return iter(strategy.experimental_distribute_dataset(data))

    first = iterator(0)
    assert parts(strategy, next(first)) == [[0, 1], [2, 3]]
    kinds = set(_traced)
    second = iterator(100)
    assert set(_traced) == kinds and len(kinds) >= 2
    assert parts(strategy, next(second)) == [[100, 101], [102, 103]]
    assert parts(strategy, next(first)) == [[4, 5], [6, 7]]
    del first
    gc.collect()
    assert parts(strategy, next(second)) == [[104, 105], [106, 107]]
    assert parts(strategy, next(iterator(200))) == [[200, 201], [202, 203]]


def test_another_shape_is_another_kind(cpus):
    strategy = tf.distribute.MirroredStrategy(cpus[:2])
    for size in (2, 3):
        data = tf.data.Dataset.from_tensors({"rows": tf.fill([2, size], size)})
        batch = next(iter(strategy.experimental_distribute_dataset(data)))["rows"]
        assert parts(strategy, batch) == [[[size] * size]] * 2
