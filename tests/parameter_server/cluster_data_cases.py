"""Cases of data under `Synchronous`: sources of all kinds, inputs by names, batches that workers create."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from cluster_cases import INPUTS, LABELS, SAMPLES, Outcome, case, compared, compiled
from cluster_synchronous_cases import SGD, synchronous

from tfdist.strategies import ParameterServerStrategy


class _Batches(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> Any:
        rows = slice(index * 29, (index + 1) * 29)
        return INPUTS[rows], LABELS[rows], np.linspace(0.1, 2.0, SAMPLES).astype("float32")[rows]


def _sources(strategy: Any) -> Outcome:
    """A PyDataset, a dataset of unknown cardinality, and an infinite one."""
    model = compiled(strategy, lambda: SGD(0.1))
    histories = [model.fit(_Batches(), epochs=2, shuffle=False, verbose=0).history]
    data = tf.data.Dataset.from_tensor_slices((INPUTS, LABELS)).batch(29)
    histories.append(model.fit(data.filter(lambda *_: True), epochs=2, verbose=0).history)
    steps = {"steps_per_epoch": 3, "epochs": 3, "validation_data": data.repeat(), "validation_steps": 2}
    histories.append(model.fit(data.repeat(), verbose=0, **steps).history)
    return {"weights": model.get_weights(), "logs": histories}


compared("sources", synchronous, _sources)


def _two_inputs() -> keras.Model:
    keras.utils.set_random_seed(1)
    left, right = keras.Input((6,), name="left"), keras.Input((6,), name="right")
    hidden = keras.layers.Dense(8, "tanh")(keras.layers.Concatenate()([left, right]))
    return keras.Model({"left": left, "right": right}, keras.layers.Dense(3)(hidden))


def _dictionary(strategy: Any) -> Outcome:
    """The loss is one value per sample; Keras computes the gradient of their sum."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    model = compiled(strategy, lambda: SGD(0.005), _two_inputs, loss=loss)
    inputs = {"left": INPUTS, "right": -INPUTS}
    history = model.fit(inputs, LABELS, batch_size=40, epochs=2, shuffle=False, verbose=0)
    return {"weights": model.get_weights(), "logs": history.history, "outputs": model.predict(inputs, verbose=0)}


compared("dict_inputs", synchronous, _dictionary)


def _of_workers(strategy: Any) -> Outcome:
    """Each worker creates its batches; all are the same, so that a round has each sample twice."""

    def make(_: Any) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices((INPUTS[:200], LABELS[:200])).batch(25).repeat()

    ours = isinstance(strategy, ParameterServerStrategy)
    twice = make(None).map(lambda x, y: (tf.repeat(x, 2, axis=0), tf.repeat(y, 2, axis=0)))
    data = strategy.distribute_datasets_from_function(make) if ours else twice
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    model = compiled(strategy, lambda: SGD(0.003), loss=loss)
    history = model.fit(data, steps_per_epoch=10, epochs=2, verbose=0)
    return {"weights": model.get_weights(), "logs": history.history}


compared("data_sets_of_workers", synchronous, _of_workers)


@case
def data_sets_that_cannot_be(_: Path) -> Outcome:
    strategy, messages = synchronous(), []
    for make in (lambda _: tf.data.Dataset.range(10).batch(2), lambda _: 3):
        try:
            data = strategy.distribute_datasets_from_function(make)
            compiled(strategy, lambda: SGD(0.003)).fit(data, steps_per_epoch=1, verbose=0)
        except ValueError as error:
            messages.append(str(error))
    return {"messages": messages}
