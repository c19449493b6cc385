"""What workers ask each other for each batch, and that results equal those of one process, for several kinds of data.

Only the short sums of whole numbers count: of the questions whether any worker has data, and how many samples it has.
"""

import contextlib

import keras
import numpy as np
import tensorflow as tf
from one_process import in_one_process

from tfdist.exchange.channel import Channel

ROWS = np.random.default_rng(3).normal(size=(48, 4)).astype("float32")
TARGETS = ROWS.sum(axis=1, keepdims=True)


def _batches(rows, **arguments):
    return tf.data.Dataset.from_tensor_slices((ROWS[:rows], TARGETS[:rows])).batch(12, **arguments)


# The data, and the arguments of `compile` and `fit`.
CASES = {
    "arrays": (lambda: (ROWS, TARGETS), {}, {"batch_size": 12, "shuffle": False}),
    "full in executions of 3": (lambda: _batches(48, drop_remainder=True), {"steps_per_execution": 3}, {}),
    "without an end": (lambda: _batches(48, drop_remainder=True).repeat(), {}, {"steps_per_epoch": 4}),
    "partial in executions of 3": (lambda: _batches(44), {"steps_per_execution": 3}, {}),
    "one row left": (lambda: _batches(37), {}, {}),
    "of unknown number": (lambda: _batches(48, drop_remainder=True).filter(lambda *_: True), {}, {}),
}


@contextlib.contextmanager
def questions():
    """Yields a list of the shapes and dtypes of the sums that workers exchange."""
    sums, stock = [], Channel.all_reduce

    def all_reduce(self, values):
        if values.size <= 2 and (values.dtype == np.int64 or values.shape == ()):
            sums.append([values.dtype.name, values.size])
        return stock(self, values)

    Channel.all_reduce = all_reduce
    try:
        yield sums
    finally:
        Channel.all_reduce = stock


def trained(scope, case):
    """The results of all methods on a case's data, and the questions of each."""
    create, compiled, fitted = CASES[case]
    with scope:
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), loss="mse", metrics=["mae"], **compiled)
    steps = fitted.get("steps_per_epoch")
    data = create()
    x, y = data if isinstance(data, tuple) else (data, None)
    asked = []
    with questions() as sums:
        history = model.fit(x, y, epochs=2, verbose=0, **fitted).history
        asked.append(list(sums))
    size = {} if y is None else {"batch_size": 12}
    with questions() as sums:
        tested = model.evaluate(x, y, steps=steps, verbose=0, **size)
        asked.append(list(sums))
    inputs = x if y is not None else x.map(lambda rows, _: rows)
    with questions() as sums:
        predicted = model.predict(inputs, steps=steps, verbose=0, **size)
        asked.append(list(sums))
    return [*history.values(), tested, predicted, *model.get_weights()], asked


def asked_for_batches(strategy):
    """By case: the largest difference from one process, and the questions of `fit`, `evaluate` and `predict`."""
    # Three other cases have the rows of "arrays", so one process trains on these once. Besides, Keras' means in one
    # process count a batch too many at the end of data of an unknown number of static batches.
    references = {
        case: in_one_process(lambda default, case=case: trained(default.scope(), case)[0])
        for case in ("arrays", "partial in executions of 3", "one row left")
    }
    found = {}
    for case in CASES:
        ours, asked = trained(strategy.scope(), case)
        one = references.get(case, references["arrays"])
        off = max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in zip(ours, one, strict=True))
        found[case] = [off, asked]
    return found
