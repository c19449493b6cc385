"""FailureRecovery with other features of `fit`: an interrupted training ends with the same bits."""

import gc
import random

import keras
import numpy as np
import pytest
import tensorflow as tf
from interruptions import Interrupt, Interrupted
from training import differences

from tfdist.callbacks import FailureRecovery
from tfdist.compression import MomentumCorrection, Policy, TopK
from tfdist.strategies import MirroredStrategy

pytestmark = pytest.mark.usefixtures("cpus")
ROWS, FEATURES, CLASSES = 32, 6, 3
_random = np.random.default_rng(0)
INPUTS = _random.normal(size=(ROWS, FEATURES)).astype("float32")
LABELS = _random.integers(0, CLASSES, size=ROWS)
Adam, SGD = keras.optimizers.Adam, keras.optimizers.SGD


def compiled(optimizer, policy="float32"):
    layers = [
        keras.layers.Dense(12, "relu", dtype=policy),
        keras.layers.Dropout(0.3, dtype=policy),
        keras.layers.Dense(CLASSES),
    ]
    model = keras.Sequential([keras.Input((FEATURES,)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, weighted_metrics=["accuracy"])
    return model


def outcome(model, *histories):
    """The results of a training, as arrays."""
    return {
        **{f"weight {index}": weight for index, weight in enumerate(model.get_weights())},
        **{f"optimizer {index}": variable.numpy() for index, variable in enumerate(model.optimizer.variables)},
        **{
            f"history {number} {name}": np.array(values)
            for number, history in enumerate(histories)
            for name, values in [*history.history.items(), ("epoch", history.epoch)]
        },
    }


def loss_scale(folder, *callbacks):
    """Gradients overflow in float16 at first; `validation_split`, every second epoch."""
    optimizer = keras.optimizers.LossScaleOptimizer(Adam(0.05), initial_scale=2.0**20, dynamic_growth_steps=3)
    model = compiled(optimizer, "mixed_float16")
    best = keras.callbacks.ModelCheckpoint(folder / "best.weights.h5", save_best_only=True, save_weights_only=True)
    history = model.fit(
        INPUTS,
        LABELS,
        batch_size=4,
        epochs=4,
        verbose=0,
        class_weight={0: 1.0, 1: 2.0, 2: 0.5},
        validation_split=0.25,
        validation_freq=2,
        callbacks=[
            best,
            keras.callbacks.TensorBoard(folder / "curves", update_freq=1, write_graph=False),
            FailureRecovery(folder / "checkpoints", every_steps=2),
            *callbacks,
        ],
    )
    ended = outcome(model, history)
    assert int(optimizer.inner_optimizer.iterations) < 4 * 6, "steps have overflown"
    first, second = history.history["val_loss"]
    assert first < second, "the best model must be that of the second epoch"
    model.load_weights(folder / "best.weights.h5")
    return {
        **ended,
        "best": np.array(best.best),
        **{f"best {i}": weight for i, weight in enumerate(model.get_weights())},
    }


class RandomRate(keras.callbacks.Callback):
    """Draws from the global generators of Python and NumPy, which hold its state."""

    is_stateless = True

    def on_train_batch_begin(self, batch, logs=None):
        self.model.optimizer.learning_rate = 0.05 * random.random() + 0.05 * np.random.random()


def sparse_gradients(folder, *callbacks):
    """Residuals of top-k and corrected momentum; `initial_epoch=1`."""
    policy = Policy(MomentumCorrection(TopK(0.3)), dense_below=0)
    strategy = MirroredStrategy(["CPU:0", "CPU:1"], compression=policy)
    with strategy.scope():
        model = compiled(SGD(0.05))
    history = model.fit(
        INPUTS,
        LABELS,
        sample_weight=np.linspace(0.5, 1.5, ROWS),
        batch_size=8,
        initial_epoch=1,
        epochs=4,
        verbose=0,
        callbacks=[RandomRate(), FailureRecovery(folder / "checkpoints", every_steps=3), *callbacks],
    )
    assert history.epoch == [1, 2, 3]
    return outcome(model, history)


def swapped_weights(folder, *callbacks):
    """Averaged weights replace the model's between epochs, for validation and for saves."""
    model = compiled(Adam(0.05, use_ema=True, ema_momentum=0.8))
    history = model.fit(
        INPUTS,
        LABELS,
        batch_size=8,
        epochs=4,
        verbose=0,
        validation_data=(INPUTS[:8], LABELS[:8]),
        callbacks=[
            keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
            FailureRecovery(folder / "checkpoints", every_steps=3, every_epochs=1),
            *callbacks,
        ],
    )
    return outcome(model, history)


def one_after_another(folder, *callbacks):
    """Two calls of `fit`, with a directory for each."""
    model = compiled(Adam(0.05))
    histories = []
    for name, rows in (("first", slice(16)), ("second", slice(16, 32))):
        recovery = FailureRecovery(folder / name, every_steps=3)
        fitted = model.fit(
            INPUTS[rows], LABELS[rows], batch_size=4, epochs=2, verbose=0, callbacks=[recovery, *callbacks]
        )
        histories.append(fitted)
    return outcome(model, *histories)


def trained(program, folder, *callbacks):
    folder.mkdir(exist_ok=True)
    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    return program(folder, *callbacks)


@pytest.mark.parametrize(
    ("program", "hook", "count"),
    [
        (loss_scale, "on_train_batch_end", 15),
        (sparse_gradients, "on_train_batch_end", 7),
        (swapped_weights, "on_train_batch_end", 8),
        pytest.param(swapped_weights, "on_epoch_begin", 3, marks=pytest.mark.long),
        pytest.param(one_after_another, "on_train_batch_end", 5, marks=pytest.mark.long),
        (one_after_another, "on_train_batch_end", 13),
    ],
)
@pytest.mark.filterwarnings("ignore:These callbacks lose their state at a restart")
def test_interrupted_training_ends_with_the_same_bits(tmp_path, curves, program, hook, count):
    expected = trained(program, tmp_path / "undisturbed")
    folder = tmp_path / "disturbed"
    with pytest.raises(Interrupted):
        trained(program, folder, Interrupt(hook, count))
    gc.collect()  # TensorBoard's writer flushes when it is collected
    assert differences(expected, trained(program, folder)) == []
    for kind in ("train", "validation"):
        drawn = [curves(tmp_path / name / "curves" / kind) for name in ("undisturbed", "disturbed")]
        # Steps after the last save were computed twice.
        assert {tag: dict(points) for tag, points in drawn[0].items()} == {
            tag: dict(points) for tag, points in drawn[1].items()
        }


def test_a_second_fit_draws_the_order_that_the_first_has_left(tmp_path):
    """Its dataset has the shuffle of the first one, which is complete after a restart and draws nothing."""

    class Seen(keras.callbacks.Callback):
        def __init__(self, stop):
            super().__init__()
            self.losses, self._stop = [], stop

        def on_train_batch_end(self, batch, logs=None):
            if len(self.losses) == self._stop:
                raise Interrupted
            self.losses.append(logs["loss"])

    def losses_of_second(name, stop=None):
        keras.utils.set_random_seed(0)
        rows = tf.data.Dataset.from_tensor_slices((INPUTS, LABELS)).shuffle(ROWS, seed=2)
        model, losses = compiled(SGD(0.0)), []  # so each loss shows the rows of its batch
        for phase, data, seen in (("first", rows.batch(8), Seen(None)), ("second", rows.batch(4), Seen(stop))):
            model.stop_training = False
            recovery = FailureRecovery(tmp_path / name / phase, every_steps=1, background=False)
            losses = seen.losses
            model.fit(data, epochs=2, verbose=0, callbacks=[recovery, seen])
        return losses

    expected = losses_of_second("whole")
    for stop in (0, 11):
        with pytest.raises(Interrupted):
            losses_of_second("other", stop)
    assert losses_of_second("other") == expected[11:]
