"""Cases of losses: whatever a loss divides by, the sum over the parts of a batch is that of one process."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from cases import cross_entropy, dataset, fitted
from cluster_cases import Outcome, compared, compiled
from custom_step_cases import OwnStep

from tfdist.private_symbols import has_reached
from tfdist.strategies import Asynchronous, ParameterServerStrategy, Synchronous

SGD = keras.optimizers.SGD
SAMPLES, STEPS, WORDS, KINDS = 13, 5, 12, 3
_random = np.random.default_rng(4)


def _tokens() -> np.ndarray:
    """Sequences of random lengths."""
    lengths = _random.integers(1, STEPS + 1, size=(SAMPLES, 1))
    return (_random.integers(1, WORDS, size=(SAMPLES, STEPS)) * (np.arange(STEPS) < lengths)).astype("int32")


INPUTS = {"left": _tokens(), "right": _tokens()}
TARGETS = {
    "masked": _random.integers(0, KINDS, size=(SAMPLES, STEPS)),
    "weighted": _random.integers(0, KINDS, size=(SAMPLES, STEPS)),
    "summed": _random.normal(size=(SAMPLES, 1)).astype("float32"),
    "mean": _random.normal(size=(SAMPLES, 1)).astype("float32"),
}
WEIGHTS = {
    "masked": _random.uniform(0.1, 2.0, size=(SAMPLES, STEPS)).astype("float32"),
    "weighted": _random.uniform(0.1, 2.0, size=(SAMPLES, STEPS)).astype("float32"),
    "summed": np.ones(SAMPLES, "float32"),
    "mean": _random.uniform(0.1, 2.0, size=SAMPLES).astype("float32"),
}


class Penalty(keras.layers.Layer):
    """Adds the mean of its input's squares to the loss."""

    def call(self, inputs: Any) -> Any:
        self.add_loss(0.1 * keras.ops.mean(inputs**2))
        return inputs


def _model(heads: Sequence[str]) -> keras.Model:
    """Two sequences with different masks, and a vector of both."""
    keras.utils.set_random_seed(2)
    layers, inputs, outputs, pooled = keras.layers, {}, {}, []
    for name, head in (("left", "masked"), ("right", "weighted")):
        inputs[name] = keras.Input((STEPS,), dtype="int32", name=name)
        hidden = layers.Embedding(WORDS, 3, mask_zero=True)(inputs[name])
        penalty = keras.regularizers.L2(0.05)
        outputs[head] = layers.Dense(KINDS, kernel_regularizer=penalty, name=head)(hidden)
        pooled.append(layers.GlobalAveragePooling1D()(hidden))
    vector = Penalty()(layers.Concatenate()(pooled))
    outputs |= {head: layers.Dense(1, name=head)(vector) for head in ("summed", "mean")}
    return keras.Model(inputs, {head: outputs[head] for head in heads})


def _compiled(strategy: Any, heads: Sequence[str]) -> keras.Model:
    cross_entropy = keras.losses.SparseCategoricalCrossentropy
    loss = {
        "masked": cross_entropy(from_logits=True),
        "weighted": cross_entropy(from_logits=True, reduction="mean_with_sample_weight"),
        "summed": keras.losses.MeanSquaredError(reduction="sum"),
        "mean": "mae",
    }
    weights = {"masked": 1.0, "weighted": 0.7, "summed": 0.05, "mean": 0.5}
    arguments = {"loss": _of(heads, loss), "loss_weights": _of(heads, weights), "metrics": lambda: None}
    return compiled(strategy, lambda: SGD(0.1), lambda: _model(heads), **arguments)


def _of(heads: Sequence[str], by_head: dict[str, Any]) -> dict[str, Any]:
    return {head: by_head[head] for head in heads}


def _fitted(batch_size: int, heads: Sequence[str]) -> Any:
    def program(strategy: Any) -> Outcome:
        model = _compiled(strategy, heads)
        data: Any = {"x": INPUTS, "y": _of(heads, TARGETS), "sample_weight": _of(heads, WEIGHTS), "verbose": 0}
        history = model.fit(**data, batch_size=batch_size, shuffle=False, epochs=3)
        logs, evaluation = history.history, model.evaluate(**data, batch_size=4)
        if has_reached("keras", "3.16"):
            # In one process it weights the means of the outputs' losses by the sizes of some batches, not of all.
            logs, evaluation = logs["loss"], evaluation[:1]
        return {"weights": model.get_weights(), "logs": logs, "evaluation": evaluation}

    return program


# Batches of 4 and 4 samples are an update, then 4 and 1.
for _name, _mode, _heads in (
    ("rounds", Synchronous(), ("masked", "weighted", "summed", "mean")),
    ("pushes", Asynchronous(0), ("masked", "summed")),
):
    compared(
        f"all_losses_of_{_name}",
        lambda mode=_mode: ParameterServerStrategy(mode=mode, gradient_accumulation_steps=2),
        _fitted(4, _heads),
        _fitted(8, _heads),
        traced=True,
    )


def _of_three_kinds(_: Any, predicted: Any, labels: Any) -> Any:
    """A loss of Keras, a mean and a sum."""
    return cross_entropy()(labels, predicted) + tf.reduce_mean(predicted**2) + 0.02 * tf.reduce_sum(abs(predicted))


def _own_loss(strategy: Any) -> Outcome:
    """Batches of 21 samples and one of 1, of which one worker has none."""
    arguments = {"data": dataset(21), "loss": lambda: None, "metrics": lambda: None}
    outcome = fitted(strategy, lambda: SGD(0.1), model=lambda: OwnStep(_of_three_kinds), **arguments)
    names = ("tracked", "total", "by_samples", "twice")  # "loss" is that of a part
    logs = {name: outcome["logs"][name] for name in names}
    return {"weights": outcome["weights"], "logs": logs}


compared("own_loss_of_rounds", lambda: ParameterServerStrategy(mode=Synchronous()), _own_loss)
