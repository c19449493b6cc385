"""Batches of a static size for replicas whose data ends at different steps, on two devices of this process."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.keras_internals.symbolic_build import build_for_training
from tfdist.strategies import MirroredStrategy
from tfdist.tensorflow_internals.input_pipeline import skip_steps
from tfdist.tensorflow_internals.rows_per_replica import (
    RowsPerReplica,
    batch_spec,
    carry_counts,
    carry_static_counts,
    filled_samples,
    has_static_sizes,
    is_complete,
    keep_static_sizes,
    mark_complete,
    parts_of_complete,
    without_filled_rows,
)

ROWS = np.arange(24, dtype="float32").reshape(12, 2)
LABELS = np.arange(12)


@pytest.fixture
def strategy(cpus):
    return MirroredStrategy(cpus[:2])


def filled(strategy, kind="function"):
    """Two steps of four rows a replica; in the second one replica 1 has no data."""
    data = tf.data.Dataset.from_tensor_slices({"rows": ROWS, "label": LABELS})
    if kind == "function":
        own = strategy.distribute_datasets_from_function(lambda _: data.batch(4, drop_remainder=True))
    else:
        own = strategy.experimental_distribute_dataset(data.batch(8, drop_remainder=True))
    own._enable_get_next_as_optional = True  # as with several workers
    return keep_static_sizes(own)


def counts(batch):
    return [int(count) for count in filled_samples(batch)]


def each_drawn(iterator, how, function):
    """Calls a function on each of two batches, which are drawn eagerly, in a function, or as optional values."""
    if how == "eagerly":
        return [function(batch) for batch in iterator]
    if how == "in a function":
        draw = tf.function(lambda iterator: function(next(iterator)))
        results = [draw(iterator) for _ in range(2)]
        with pytest.raises(tf.errors.OutOfRangeError):
            draw(iterator)
        return results
    traced, results = tf.function(function), []
    while (optional := iterator.get_next_as_optional()).has_value():
        results.append(traced(optional.get_value()))
    return results


@pytest.mark.parametrize("drawn", ["eagerly", "in a function", "optional", "in a loop"])
def test_a_replica_without_data_has_as_many_rows_of_zeros(strategy, drawn):
    sizes = set()

    def total(batch):
        sizes.update(part.shape[0] for leaf in batch.values() for part in leaf.values)
        parts = [tf.reduce_sum(part) for part in batch["rows"].values]
        return tf.stack([*parts, *[tf.cast(count, tf.float32) for count in filled_samples(batch)]])

    iterator = iter(filled(strategy))
    if drawn != "in a loop":
        steps = each_drawn(iterator, drawn, total)
    else:

        @tf.function
        def all_steps(iterator):
            def body(index, optional, found):
                found = found.write(index, total(optional.get_value()))
                return index + 1, iterator.get_next_as_optional(), found

            start = (0, iterator.get_next_as_optional(), tf.TensorArray(tf.float32, 2))
            loop = tf.while_loop(lambda index, optional, found: optional.has_value(), body, start)
            return tf.unstack(loop[2].stack(), 2)

        steps = all_steps(iterator)
    assert [step.numpy().tolist() for step in steps] == [
        [ROWS[:4].sum(), ROWS[4:8].sum(), 4, 4],
        [ROWS[8:].sum(), 0, 4, 0],
    ]
    assert sizes == {4}


def test_the_steps_of_both_kinds_of_batches_are_traced_separately(strategy):
    traced = []
    step = tf.function(lambda batch: traced.append(type(batch["rows"])), reduce_retracing=True)
    data = filled(strategy)
    for batch in [*data, without_filled_rows(next(iter(data)))]:
        step(batch)
    assert traced[0] is RowsPerReplica
    assert len(traced) == 2 and not issubclass(traced[1], RowsPerReplica)


def test_without_filled_rows_a_replica_without_data_has_no_rows(strategy):
    last = without_filled_rows(list(filled(strategy))[-1])
    assert [part.shape[0] for part in strategy.experimental_local_results(last["rows"])] == [4, 0]
    assert filled_samples(last) is None
    seen = strategy.run(lambda batch: tf.shape(batch["rows"])[0], args=(list(filled(strategy))[-1],))
    assert [int(size) for size in strategy.experimental_local_results(seen)] == [4, 0]


@pytest.mark.parametrize("kind", ["function", "dataset"])
def test_a_dataset_without_its_first_steps_keeps_the_sizes(strategy, kind):
    data = filled(strategy, kind)
    rest = skip_steps(data, 1)
    assert batch_spec(rest) == batch_spec(data)
    (last,) = rest if kind == "function" else [*rest, *data]
    assert last["label"].values[0].shape == [4]
    assert counts(last) == ([4, 0] if kind == "function" else [4, 4])


def counted(strategy):
    """Steps of 6 and 6 rows, then of 3 and none; the labels carry nothing."""
    data = tf.data.Dataset.from_tensor_slices((np.arange(15, dtype="float32")[:, np.newaxis], np.ones([15])))
    own = strategy.distribute_datasets_from_function(lambda _: data.batch(6))
    own._enable_get_next_as_optional = True
    return carry_counts(own, own._element_spec[0])


@pytest.mark.parametrize("drawn", ["eagerly", "in a function", "optional"])
def test_batches_of_any_size_carry_their_samples_and_the_total(strategy, drawn):
    def numbers(batch):
        assert isinstance(batch[0], RowsPerReplica) and not isinstance(batch[1], RowsPerReplica)
        rows = [tf.shape(part, out_type=tf.int64)[0] for part in batch[0].values]
        return tf.stack([*rows, *batch[0].samples, batch[0].total])

    steps = each_drawn(iter(counted(strategy)), drawn, numbers)
    assert [step.numpy().tolist() for step in steps] == [[6, 6, 6, 6, 12], [3, 0, 3, 0, 3]]


def test_full_batches_carry_numbers_that_are_known_while_tracing(strategy):
    data = tf.data.Dataset.from_tensor_slices({"rows": ROWS, "label": LABELS}).repeat(2)
    own = strategy.distribute_datasets_from_function(lambda _: data.batch(4, drop_remainder=True))
    full, seen = carry_static_counts(own, 6), []  # of three workers

    @tf.function
    def all_steps(iterator):
        def body(steps, optional):
            seen.append([(leaf.samples, leaf.total) for leaf in optional.get_value().values()])
            return steps + 1, iterator.get_next_as_optional()

        start = 0, iterator.get_next_as_optional()
        return tf.while_loop(lambda steps, optional: optional.has_value(), body, start)[0]

    assert int(all_steps(iter(full))) == 3
    assert seen == [[((4, 4), 24)] * 2]
    assert [batch["rows"].total for batch in full] == [24] * 3
    assert batch_spec(full) == full._element_spec != own._element_spec


def complete(strategy, parts=4, *, asks):
    """Steps in which both replicas draw the same four rows, as long as there are `parts` for them."""
    data = tf.data.Dataset.range(8).batch(4).flat_map(lambda rows: tf.data.Dataset.from_tensors(rows).repeat(2))
    own = strategy.distribute_datasets_from_function(lambda _: data.take(parts).map(lambda rows: {"rows": rows}))
    own._enable_get_next_as_optional = asks
    return mark_complete(own)


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("drawn", ["eagerly", "in a function", "optional"])
def test_each_replica_draws_all_rows_of_a_complete_batch(strategy, drawn, asks):
    kinds = set()

    def rows_of_replicas(batch):
        kinds.add((type(batch["rows"]), is_complete(batch), filled_samples(batch)))
        parts = parts_of_complete(batch, lambda leaves, replica: [leaf[2 * replica :][:2] for leaf in leaves])
        assert not is_complete(parts) and not isinstance(parts["rows"], RowsPerReplica)
        return tf.stack([*batch["rows"].values, tf.concat(parts["rows"].values, axis=0)])

    steps = each_drawn(iter(complete(strategy, asks=asks)), drawn, rows_of_replicas)
    assert [step.numpy().tolist() for step in steps] == [[[0, 1, 2, 3]] * 3, [[4, 5, 6, 7]] * 3]
    assert kinds == {(RowsPerReplica, True, None)}


def test_a_replica_whose_complete_batches_end_before_others_is_an_error(strategy):
    iterator = iter(complete(strategy, 3, asks=True))
    next(iterator)
    with pytest.raises(tf.errors.InvalidArgumentError, match="data of this worker has ended and that of another one"):
        next(iterator)


def test_each_kind_of_batches_is_traced_separately(strategy):
    traced, data = [], tf.data.Dataset.range(8).batch(4, drop_remainder=True)
    own = strategy.distribute_datasets_from_function(lambda _: data)
    own._enable_get_next_as_optional = True
    with_counts = carry_counts(own, own._element_spec)
    kinds = (own, mark_complete(own), carry_static_counts(own, 2), with_counts, keep_static_sizes(own))
    step = tf.function(lambda batch: traced.append(batch._type_spec), reduce_retracing=True)
    for _ in range(2):
        for batches in kinds:
            step(next(iter(batches)))
    assert len(traced) == len(set(traced)) == len(kinds)


def test_what_a_user_computes_from_a_batch_carries_no_numbers(strategy):
    own = strategy.distribute_datasets_from_function(lambda _: tf.data.Dataset.range(8).batch(4, drop_remainder=True))
    for batch in (next(iter(carry_static_counts(own, 2))), next(iter(counted(strategy)))[0]):
        assert isinstance(tf.nest.map_structure(lambda leaf: leaf, batch), RowsPerReplica)
        assert isinstance(tf.function(lambda leaf: leaf)(batch), RowsPerReplica)
        changed = [
            strategy.run(lambda rows: rows[:3], args=(batch,)),
            tf.function(lambda value: strategy.run(lambda rows: rows[::2], args=(value,)))(batch),
            tf.nest.map_structure(lambda rows: rows[:3], batch, expand_composites=True),
        ]
        for value in changed:
            assert not isinstance(value, RowsPerReplica)


def test_rows_that_changed_behind_their_numbers_are_an_error(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x, y = next(iter(counted(strategy)))

    @tf.function
    def step(x, y, rows):
        if rows < 6:  # the size is unknown while tracing, as are those of the batches
            x, y = tf.nest.map_structure(lambda part: part[:rows], (x, y), expand_composites=True)
        return strategy.run(model.train_step, args=((x, y),))

    step(x, y, tf.constant(6))
    with pytest.raises(tf.errors.InvalidArgumentError, match="rows of a distributed batch have changed"):
        step(x, y, tf.constant(5))


def test_sizes_that_are_not_static_are_recognised(strategy):
    def of(dataset):
        return strategy.distribute_datasets_from_function(lambda _: dataset)

    numbers = tf.data.Dataset.range(8)
    ragged = tf.data.Dataset.from_tensor_slices(tf.ragged.range(tf.range(8)))
    assert has_static_sizes(of(numbers.batch(4, drop_remainder=True)))
    for dynamic in (
        numbers,
        numbers.batch(4),
        ragged.batch(4, drop_remainder=True),
        tf.data.Dataset.zip(numbers.batch(4, drop_remainder=True), numbers.batch(4)),
    ):
        assert not has_static_sizes(of(dynamic))


class StaticRows(keras.layers.Layer):
    """Returns its input, and needs a static number of rows."""

    def compute_output_spec(self, inputs):
        return keras.KerasTensor(inputs.shape, inputs.dtype)

    def call(self, inputs):
        return tf.reshape(inputs, [inputs.shape[0] * 3 // 3, 3])


@pytest.mark.parametrize(
    ("micro_batches", "synchronized"),
    [(1, False), (1, True), pytest.param(3, False, marks=pytest.mark.long), (5, True)],
)
def test_a_filled_replica_changes_nothing_in_training_and_evaluation(strategy, cpus, micro_batches, synchronized):
    """Also in micro-batches, of which the last has no rows, and in statistics over all replicas."""

    def outcome(strategy, batches):
        with strategy.scope():
            keras.utils.set_random_seed(0)
            normalized = [keras.layers.BatchNormalization(synchronized=True)] if synchronized else []
            static = [StaticRows()] if synchronized and micro_batches == 1 else []
            hidden = [keras.layers.Dense(3, "tanh"), *normalized, *static]
            model = keras.Sequential([keras.Input((2,)), *hidden, keras.layers.Dense(1)])
            model.compile(keras.optimizers.Adam(0.1), "mse", metrics=[keras.metrics.MeanAbsoluteError()])
        build_for_training(model, (tf.TensorSpec([4, 2]), tf.TensorSpec([4])))
        step = tf.function(lambda batch: strategy.run(model.train_step, args=(batch,)))
        test = tf.function(lambda batch: strategy.run(model.test_step, args=(batch,)))
        logs = [step(batch) for batch in batches]
        tested = [test(batch) for batch in batches]
        leaves = [strategy.experimental_local_results(leaf)[0] for leaf in tf.nest.flatten([logs, tested])]
        return [leaf.numpy() for leaf in leaves], model.get_weights()

    def pair(batch):
        return batch["rows"], tf.cast(batch["label"], tf.float32)

    pairs = tf.data.Dataset.from_tensor_slices({"rows": ROWS, "label": LABELS}).map(pair)
    one = outcome(tf.distribute.get_strategy(), [*pairs.take(8).batch(8), *pairs.skip(8).batch(4)])

    class InParts(MirroredStrategy):
        pass

    InParts.micro_batches = micro_batches
    parts = InParts(cpus[:2])
    own = parts.distribute_datasets_from_function(lambda _: pairs.batch(4, drop_remainder=True))
    own._enable_get_next_as_optional = True
    ours = outcome(parts, list(keep_static_sizes(own)))
    for mine, theirs in zip(tf.nest.flatten(ours), tf.nest.flatten(one), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)
