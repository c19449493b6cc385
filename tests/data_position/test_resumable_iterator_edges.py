"""Positions in unusual data: without seeds, generators, changed data; what resuming costs."""

import itertools
import json
import warnings

import keras
import pytest
import tensorflow as tf
from data_runs import BATCH, EPOCHS, IDS, SEED, Numbers, Recorder, Start, Watch, dataset, endless, train
from position_cases import CASES, arrays

from tfdist.data_position.position import Position
from tfdist.data_position.resumable_iterator import patch_epoch_iterator, start_at_epoch, training_iterator
from tfdist.keras_internals import epoch_iterator
from tfdist.keras_internals.epoch_iterator import patch_loops_over_epochs
from tfdist.strategy_hooks import StrategyHooks
from tfdist.tensorflow_internals.input_pipeline import batches_to_replay, create_unused_iterator, random_seeds


@pytest.fixture(autouse=True)
def _quiet(recwarn):
    """Ignores Keras' warnings about `shuffle=True` and data that ends."""
    yield


@pytest.fixture
def strategy(cpus):
    return tf.distribute.get_strategy()


def after(run, number):
    """Returns the position after `number` executions, as a checkpoint would restore it."""
    start = run.positions[number]
    return Start(start.epoch, json.loads(json.dumps(start.position)), start.random_state)


def test_interrupted_and_resumed_training_see_every_sample_once(strategy):
    whole = train(CASES["dataset reshuffled"], strategy)
    begun = train(CASES["dataset reshuffled"], strategy, fail_after=8, model=fresh_model())
    rest = train(CASES["dataset reshuffled"], strategy, after(begun, 8), model=fresh_model())
    assert len(begun.ids) == 8 and begun.ids + rest.ids == whole.ids
    for epoch in range(EPOCHS):
        ids = [ids for (number, _, _), ids in zip(begun.steps + rest.steps, whole.ids, strict=True) if number == epoch]
        assert sorted(itertools.chain(*ids)) == IDS.tolist(), "each sample once an epoch"


def fresh_model():
    model = Recorder()
    model.compile()
    return model


def test_the_batch_that_a_model_is_built_with_is_drawn_once(strategy):
    def train_new(start=None):
        with (one := tf.distribute.OneDeviceStrategy("CPU:0")).scope():
            return train(CASES["dataset reshuffled"], one, start, model=fresh_model())

    whole = train_new()
    assert whole.positions[1].position["finished"] == [1], "which stock strategies draw"
    for number in (3, 8):
        assert train_new(after(whole, number)).ids == whole.ids[number:]


def test_unseeded_arrays_repeat_their_order_which_differs_by_epoch(strategy):
    whole = train(arrays, strategy, seed=None)
    epochs = [whole.ids[first : first + 6] for first in (0, 6, 12)]
    assert epochs[0] != epochs[1] != epochs[2]
    for number in (1, 6, 7, 17):
        assert train(arrays, strategy, after(whole, number), seed=None).ids == whole.ids[number:]


def test_arrays_use_the_seed_of_the_resumed_run(strategy):
    whole = train(arrays, strategy)
    assert train(arrays, strategy, after(whole, 8), seed=SEED + 1).ids == whole.ids[8:]
    assert train(arrays, strategy, after(whole, 8), seed=None).ids == whole.ids[8:]
    unseeded = train(arrays, strategy, seed=None)
    assert train(arrays, strategy, after(unseeded, 8)).ids == unseeded.ids[8:]


def test_seeding_arrays_does_not_change_the_programs_generators(strategy):
    def drawn(start):
        numbers = []

        class Draw(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                numbers.append(float(tf.random.uniform([])))

        run = train(arrays, strategy, start, callbacks=[Draw()])
        return run, numbers

    whole, numbers = drawn(None)
    other = train(arrays, strategy, seed=SEED + 1)
    assert drawn(after(other, 3))[1] == numbers


def test_unseeded_shuffle_is_a_warning(strategy):
    def data(strategy):
        return {"x": dataset().shuffle(50).batch(BATCH), "epochs": 1}

    with pytest.warns(RuntimeWarning, match="cannot be repeated: a shuffle.*has no seed.*set_random_seed"):
        train(data, strategy, seed=None)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        train(data, strategy)


def test_another_seed_is_a_warning(strategy):
    def data(strategy):
        return {"x": dataset().shuffle(50).batch(BATCH), "epochs": 2}

    whole = train(data, strategy)
    with pytest.warns(RuntimeWarning, match=rf"another order.*Received: seeds \[\[{SEED + 1}, .*\[\[{SEED}, "):
        rest = train(data, strategy, after(whole, 3), seed=SEED + 1)
    assert [step[:2] for step in rest.steps] == [step[:2] for step in whole.steps[3:]]


def test_a_random_operation_without_a_seed_is_found():
    tf.random.set_seed(None)
    assert [0, 0] in random_seeds(dataset().map(lambda number: number + tf.random.uniform([], 0, 9, tf.int64)))
    assert random_seeds(dataset().map(lambda number: number + 1)) == []


def test_generator_is_replayed_only_if_allowed(strategy):
    def data(strategy):
        return {"x": endless(), "steps_per_epoch": 4}

    whole = train(data, strategy)
    with pytest.raises(RuntimeError, match="data is a generator.*Received: 6 batches.*Expected: a tf.data.Dataset"):
        train(data, strategy, after(whole, 6))
    assert train(data, strategy, after(whole, 0)).ids == whole.ids, "nothing has been drawn"
    for number in (1, 4, 6):
        assert train(data, strategy, after(whole, number), replay=True).ids == whole.ids[number:]


def test_generator_with_several_iterators_is_rejected(strategy):
    def data(strategy):
        return {"x": (batch for batch in itertools.islice(endless(), 6))}

    whole = train(data, strategy)
    with pytest.raises(RuntimeError, match="cannot be counted: 3 iterators"):
        train(data, strategy, after(whole, len(whole.steps)), replay=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 5}, "number of batches. Received: 5. Expected: 6"),
        ({"steps_per_epoch": 3}, "steps_per_epoch. Received: 3. Expected: None"),
        ({"steps_per_execution": 2}, "steps_per_execution. Received: 2. Expected: 1"),
        ({"x": Numbers(), "batch_size": None}, "kind of data. Received: keras.utils.PyDataset. Expected: arrays"),
        ({"shuffle": False}, "differs from that of the checkpoint. Received: shuffle=False. Expected: `shuffle=True`"),
    ],
)
def test_other_data_is_rejected_before_training(strategy, change, message):
    whole = train(arrays, strategy, epochs=1)
    with pytest.raises(ValueError, match=message):
        train(lambda strategy: arrays(strategy, **change), strategy, after(whole, 3))


def test_data_with_more_iterators_than_before_is_rejected(strategy):
    run = train(arrays, strategy, epochs=1)
    data = CASES["dataset reshuffled"]
    position = {**train(data, strategy, epochs=1).positions[0].position, "finished": []}

    class Late(Watch):
        def on_train_begin(self, logs=None):
            pass

        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                training_iterator(self.model).resume_at(Position.from_json(position))

        def on_train_batch_end(self, batch, logs=None):
            pass

        def on_epoch_end(self, epoch, logs=None):
            pass

    with pytest.raises(RuntimeError, match="More iterators .*Received: 2 iterators. Expected: at most 0"):
        fresh_model().fit(
            **data(strategy), shuffle=False, epochs=2, verbose=0, callbacks=[Late(run, None, None, False)]
        )


def test_batches_of_a_py_dataset_are_skipped_without_reading(strategy):
    whole = train(CASES["PyDataset in order"], strategy, epochs=1)
    numbers = Numbers()
    train(lambda strategy: {"x": numbers}, strategy, after(whole, 4), epochs=1)
    assert list(numbers.read)[2:] == [4, 5]  # Keras reads the first two for their shapes


def test_processes_read_the_remaining_batches_of_a_py_dataset(strategy):
    def data(strategy):
        return {"x": Numbers(workers=2, use_multiprocessing=True), "shuffle": True, "epochs": 2}

    whole = train(data, strategy)
    assert train(data, strategy, after(whole, 8)).ids == whole.ids[8:]


def test_py_dataset_workers_that_stop_within_a_pass_are_a_warning(strategy):
    with pytest.warns(RuntimeWarning, match="Received: steps_per_epoch=4 of 6 batches, with workers"):
        train(lambda strategy: {"x": Numbers(workers=2), "steps_per_epoch": 4, "epochs": 1}, strategy)


def test_resume_cost(strategy):
    whole = train(CASES["dataset reshuffled"], strategy)
    assert (whole.resume_cost.iterators, whole.resume_cost.batches, whole.resume_cost.seconds) == (0, 0, 0.0)
    skipped = train(CASES["dataset reshuffled"], strategy, after(whole, 9)).resume_cost
    assert (skipped.iterators, skipped.batches) == (2, 3) and skipped.seconds > 0


IN_STEP = {
    "map": lambda data: data.map(lambda number: number + 1, num_parallel_calls=2),
    "batch": lambda data: data.batch(3, num_parallel_calls=2).rebatch(4).unbatch().padded_batch(2),
    "filter": lambda data: data.filter(lambda number: number > 3),
    "parts": lambda data: data.skip(1).take(15).shard(2, 0),
    "zip": lambda data: tf.data.Dataset.zip(data, data.enumerate()),
    "flat_map": lambda data: data.flat_map(lambda number: tf.data.Dataset.from_tensors(number).repeat(2)),
    "interleave": lambda data: data.interleave(tf.data.Dataset.from_tensors, 2, num_parallel_calls=1),
    "prefetch": lambda data: data.prefetch(2).with_options(tf.data.Options()),
}
OUT_OF_STEP = {
    "another shuffle": lambda data: data.shuffle(3, seed=1),
    "repeat": lambda data: data.repeat(2),
    "concatenate": lambda data: tf.data.Dataset.range(3).concatenate(data),
    "cache": lambda data: data.cache(),
}


@pytest.mark.parametrize("name", [*IN_STEP, *OUT_OF_STEP])
def test_replayed_iterators_lead_to_the_same_order(name):
    def make():
        return {**IN_STEP, **OUT_OF_STEP}[name](tf.data.Dataset.range(16).shuffle(16, seed=4))

    drawn = make()
    orders = [[str(element) for element in drawn.as_numpy_iterator()] for _ in range(3)]
    data, decisive = make(), batches_to_replay(make())
    assert decisive == {"another shuffle": 1}.get(name, 0 if name in IN_STEP else None)
    for _ in range(2):
        list(data.take(decisive)) if decisive else create_unused_iterator(data) if decisive == 0 else list(data)
    assert [str(element) for element in data.as_numpy_iterator()] == orders[2]


def test_only_training_data_has_a_position(strategy):
    model, asked = fresh_model(), []

    class Ask(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.evaluate(tf.data.Dataset.from_tensor_slices(IDS).batch(11), verbose=0)
            asked.append(training_iterator(self.model).position(0))

        def on_test_batch_end(self, batch, logs=None):
            asked.append(training_iterator(self.model).position(3))

    patch_epoch_iterator()
    model.fit(**arrays(strategy, validation_data=(IDS,)), epochs=1, verbose=0, callbacks=[Ask()])
    assert {(position.source, position.num_batches) for position in asked} == {("arrays", 6)}
    with pytest.raises(RuntimeError, match="only while `fit` runs"):
        training_iterator(model)
    with pytest.raises(RuntimeError, match="only while `fit` runs"):
        start_at_epoch(model, 1)


def test_the_next_fit_begins_at_the_beginning(strategy):
    model = fresh_model()
    whole = train(arrays, strategy, model=model)
    attributes = set(vars(model))
    assert len(train(arrays, strategy, after(whole, 8), model=model).steps) == 10
    assert set(vars(model)) == attributes
    assert len(train(arrays, strategy, after(whole, 8), model=model, fail_after=2).steps) == 2
    assert train(arrays, strategy, model=model).steps == whole.steps


@pytest.mark.parametrize("agreement_first", [True, False])
def test_workers_that_agree_on_the_number_of_batches_keep_it(unpatched, strategy, agreement_first, monkeypatch):
    """The two extensions of Keras' iterator combine in either order."""
    hooks = StrategyHooks(agree_on_batches=lambda strategy, batches: batches and 4)
    monkeypatch.setattr(epoch_iterator, "hooks_of", lambda strategy: hooks)
    installs = [patch_loops_over_epochs, patch_epoch_iterator]
    for install in installs if agreement_first else reversed(installs):
        install()
    whole = train(CASES["dataset reshuffled"], strategy)
    assert len(whole.steps) == 4 * EPOCHS
    for number in (4, 6):
        rest = train(CASES["dataset reshuffled"], strategy, after(whole, number))
        assert rest.steps == whole.steps[number:] and rest.positions[-1].position["num_batches"] == 4


def test_position_of_another_version_is_rejected():
    with pytest.raises(ValueError, match="Invalid position in the training data. Received: .*Expected: .*next_step"):
        Position.from_json({"next_step": 1})
