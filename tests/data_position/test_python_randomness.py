"""tf.data pipelines with Python code that draws random numbers, and pipelines without a fixed order."""

import gc
import random
import time
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from data_runs import BATCH, IDS, SEED, dataset, train
from recovered_runs import STEPS, Drawing, cut_off, cut_off_anywhere, each_once, run

from tfdist.data_position import python_randomness
from tfdist.data_position.python_randomness import PythonRandomness, find_generators, set_state_of, state_of
from tfdist.tensorflow_internals.input_pipeline import runs_python

pytestmark = pytest.mark.usefixtures("cpus")


@pytest.fixture(autouse=True)
def no_earlier_test_draws():
    gc.collect()  # a thread that reads ahead draws from the global generators until its iterator is freed


def from_generator(order, noise=lambda: 0):
    """Returns the ids in the order of `order(ids)` for every pass, with noise in hundreds."""

    def ids():
        for number in order(IDS):
            yield number + 100 * noise()

    data = tf.data.Dataset.from_generator(ids, output_signature=tf.TensorSpec((), tf.int64))
    return data.batch(BATCH).apply(tf.data.experimental.assert_cardinality(STEPS)).prefetch(2)


class Loader:
    def __init__(self, seed):
        self.generator = np.random.RandomState(seed)

    def order(self, ids):
        return self.generator.permutation(ids)


def with_a_generator_of_its_own():
    generator = np.random.default_rng(SEED)
    return from_generator(generator.permutation, lambda: generator.integers(1, 9))


def with_noise_in_a_map():
    return dataset().map(lambda number: tf.numpy_function(noisy, [number], tf.int64)).batch(BATCH)


def noisy(number):
    return number + 100 * np.random.randint(1, 9)


RANDOM = {
    "NumPy's": lambda: from_generator(np.random.permutation, lambda: np.random.randint(1, 9)),
    "Python's": lambda: from_generator(lambda ids: random.sample(list(ids), len(ids)), lambda: random.randrange(1, 9)),
    "its own": with_a_generator_of_its_own,
    "an object's": lambda: from_generator(Loader(SEED).order),
    "created by each pass": lambda: from_generator(lambda ids: np.random.default_rng(SEED).permutation(ids)),
    "in a map": with_noise_in_a_map,
}


@pytest.mark.parametrize("name", RANDOM)
def test_python_code_draws_the_same_numbers_again(name, tmp_path):
    whole = run(RANDOM[name], tmp_path / "whole", saves={"every_epochs": 2})
    assert each_once(whole)
    for where, seen in cut_off_anywhere(RANDOM[name], tmp_path).items():
        assert seen == whole, where


def endless_batches(order, noise=lambda: 0):
    """A Python generator for `fit`, which begins each pass with `order(ids)`."""
    while True:
        ids = order(IDS)
        for first in range(0, len(IDS), BATCH):
            yield (np.array([number + 100 * noise() for number in ids[first : first + BATCH]]),)


GENERATORS = {
    "NumPy's": lambda: endless_batches(np.random.permutation),  # reading ahead, it draws an order before its turn
    "Python's": lambda: endless_batches(lambda ids: random.sample(list(ids), len(ids)), lambda: random.randrange(1, 9)),
}


@pytest.mark.parametrize("name", GENERATORS)
def test_generators_draw_the_same_numbers_again(name, tmp_path):
    whole = run(GENERATORS[name], tmp_path / "whole", steps_per_epoch=STEPS)
    assert each_once(whole)
    for moment in (3, STEPS, STEPS + 3):
        saves, callbacks = {"every_steps": moment, "replay_data": True}, [Late()]
        folder = tmp_path / str(moment)
        seen = cut_off(GENERATORS[name], folder, moment, saves=saves, steps_per_epoch=STEPS, callbacks=callbacks)
        assert seen == whole, moment


class Late(keras.callbacks.Callback):
    """Lets the data be read ahead before each save."""

    is_stateless = True

    def on_train_batch_begin(self, batch, logs=None):
        time.sleep(0.05)


def test_python_code_needs_no_seed(tmp_path):
    for moment in (2, STEPS + 2):
        saves = {"every_steps": moment}
        assert each_once(cut_off(RANDOM["NumPy's"], tmp_path / str(moment), moment, seed=None, saves=saves)), moment


def test_draws_of_others_are_not_repeated(tmp_path):
    """If the data draws nothing, the global generators keep their states of the save."""
    whole, begun, rest = Drawing(), Drawing(), Drawing()
    make = RANDOM["created by each pass"]
    run(make, tmp_path / "whole", callbacks=[whole], saves={"every_epochs": 2})
    run(make, tmp_path / "cut", 3, callbacks=[begun], saves={"every_steps": 2})
    run(make, tmp_path / "cut", callbacks=[rest], saves={"every_epochs": 2})
    assert begun.drawn[:2] + rest.drawn == whole.drawn


def test_generators_are_found_in_closures_defaults_and_globals():
    one, other, third = np.random.default_rng(1), np.random.RandomState(2), random.Random(3)
    loader = Loader(4)

    def closure(default=other):
        return [lambda: one.random(), default, third.random()]

    def global_name():
        return np.random.random(), random.random(), _GENERATOR.random()

    assert find_generators([closure]) == [one, third, other]
    assert find_generators([loader.order]) == [loader.generator]
    assert find_generators([global_name]) == [_GENERATOR]
    for generator in (one, other, third):
        state = state_of(generator)
        drawn = generator.random()
        set_state_of(generator, state)
        assert generator.random() == drawn
    assert runs_python(RANDOM["its own"]()) and runs_python(with_noise_in_a_map()) and not runs_python(dataset())


_GENERATOR = np.random.default_rng(5)


def test_search_skips_foreign_objects(monkeypatch):
    class Lazy:
        def __getattr__(self, name):
            raise LookupError(name)

    class Deep(Loader):
        def __init__(self, layers):
            super().__init__(1)
            self.layers = layers

    secret, lazy, mine = random.SystemRandom(), Lazy(), np.random.default_rng(6)
    network, wide = keras.layers.Dropout(0.5), [[object() for _ in range(100)] for _ in range(100)]
    network.augmentation = Loader(7)
    lazy.generator = one = random.Random(8)
    assert find_generators([lambda: (secret, lazy, mine, network)]) == [mine, one]
    hidden = Deep([[Deep(part) for part in wide] for _ in range(10)])
    monkeypatch.setattr(python_randomness, "_MOST_VALUES", 100)
    assert hidden.generator in (found := find_generators([lambda: hidden])) and len(found) < 100
    PythonRandomness([lambda: secret.random()]).begin_pass()


def test_another_number_of_generators_is_a_warning():
    one, other = np.random.default_rng(1), np.random.default_rng(2)
    states = PythonRandomness([lambda: one.random()]).states(within_pass=False)
    now = PythonRandomness([lambda: (one, other)])
    drawn = one.random()
    with pytest.warns(RuntimeWarning, match="differ from those before the restart.*Received: 2 of them. Expected: 1"):
        now.restore(states)
    assert one.random() != drawn
    PythonRandomness([lambda: one.random()]).restore(states)
    assert one.random() == drawn


def unordered_option(data):
    options = tf.data.Options()
    options.deterministic = False
    return data.with_options(options).map(abs)


UNORDERED = {
    "option": unordered_option,
    "map": lambda data: data.map(abs, 2, deterministic=False),
    "interleave": lambda data: data.interleave(tf.data.Dataset.from_tensors, num_parallel_calls=2, deterministic=False),
    "batch": lambda data: data.batch(2, num_parallel_calls=2, deterministic=False).unbatch(),
    "within": lambda data: data.flat_map(
        lambda number: tf.data.Dataset.from_tensors(number).map(abs, 2, deterministic=False)
    ),
}
ORDERED = {
    "map": lambda data: data.map(abs, 2),
    "interleave": lambda data: data.interleave(tf.data.Dataset.from_tensors, num_parallel_calls=2, deterministic=True),
    "batch": lambda data: data.batch(2, num_parallel_calls=2).unbatch(),
}


@pytest.mark.parametrize("name", UNORDERED)
def test_nondeterministic_order_is_a_warning(name):
    with pytest.warns(RuntimeWarning, match="in the order in which they are ready.*Received: `deterministic=False`"):
        train(
            lambda strategy: {"x": UNORDERED[name](dataset()).batch(BATCH), "epochs": 1}, tf.distribute.get_strategy()
        )


@pytest.mark.parametrize("name", ORDERED)
def test_deterministic_threads_are_no_warning(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        train(lambda strategy: {"x": ORDERED[name](dataset()).batch(BATCH)}, tf.distribute.get_strategy(), epochs=1)
