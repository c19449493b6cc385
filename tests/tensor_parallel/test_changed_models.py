"""A model with split variables that a program changes between two calls of `fit` learns what it does in one process."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pipeline_runs as runs
import pytest
from layout_models import strategy_of
from one_process import in_one_process

layers, optimizers = keras.layers, keras.optimizers
pytestmark = pytest.mark.usefixtures("cpus")


class _Phases:
    """Trains a model, and changes it before each further training."""

    def __init__(self, strategy: Any, folder: Path) -> None:
        self._strategy, self._folder = strategy, folder
        self.found: dict[str, list[np.ndarray]] = {}
        with strategy.scope():
            keras.utils.set_random_seed(1)
            x = keras.Input((12,))
            hidden = layers.Dense(16, "gelu", name="up")(layers.Dense(8, "relu", name="first")(x))
            hidden = layers.Dense(8, name="down")(runs.Penalty()(hidden))
            self.model = keras.Model(x, layers.Dense(5, name="head")(hidden))
            self.other = keras.Model(x, layers.Dense(3, name="other")(hidden))

    def fit(self, phase: str, model: Any = None, optimizer: Any = None) -> None:
        """Compiles a model if there is an optimizer, and trains it."""
        model = model or self.model
        if optimizer is not None:
            with self._strategy.scope():
                loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
                model.compile(optimizer(), "mse" if model is self.other else loss)
        y = runs.VALUES if model is self.other else runs.CLASSES
        logs = model.fit(runs.X, y, 25, shuffle=False, verbose=0).history
        of_optimizer = [np.array(one.numpy(), "float64") for one in model.optimizer.variables]
        self.found[phase] = [np.array(logs["loss"]), *of_optimizer, *self.model.get_weights()]

    def set_trainable(self, trainable: bool, *names: str) -> None:
        """Freezes layers, or trains them again."""
        for name in names:
            self.model.get_layer(name).trainable = trainable

    def run(self) -> dict[str, list[np.ndarray]]:
        """Returns the loss, the variables of the optimizer and the weights after each phase."""
        self.fit("momentum", optimizer=lambda: optimizers.SGD(0.05, momentum=0.9))
        kept = self.model.get_weights()
        self.model.save_weights(self._folder / "kept.weights.h5")
        self.fit("another optimizer", optimizer=lambda: optimizers.Adam(1e-2, epsilon=1e-3, use_ema=True, clipnorm=0.5))
        self.set_trainable(False, "up", "head")
        self.fit("frozen", optimizer=lambda: optimizers.Adam(1e-2, epsilon=1e-3))
        self.set_trainable(True, "up", "head")
        self.fit("trained again", optimizer=lambda: optimizers.Adam(1e-2, epsilon=1e-3))
        self.fit("same optimizer", optimizer=lambda: self.model.optimizer)
        self.model.set_weights([0.5 * one for one in kept])
        self.fit("set weights")
        self.model.load_weights(self._folder / "kept.weights.h5")
        self.fit("loaded weights")
        self.fit("shared layers", self.other, lambda: optimizers.SGD(0.05, momentum=0.9))
        self.fit("first model again")
        return self.found


@pytest.mark.parametrize(
    ("ways", "stages", "columns"),
    [(2, 1, 1), *(pytest.param(*of, marks=pytest.mark.long) for of in [(2, 2, 1), (2, 1, 2)])],
)
def test_changes_between_trainings(ways: int, stages: int, columns: int, tmp_path: Path) -> None:
    found = _Phases(strategy_of(ways, stages, columns), tmp_path).run()
    expected = in_one_process(lambda strategy: _Phases(strategy, tmp_path).run())
    assert found.keys() == expected.keys()
    for phase, values in expected.items():
        for ours, theirs in zip(found[phase], values, strict=True):
            # Sums over devices and micro-batches are rounded in another order; gradients reach 10.
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5, err_msg=phase)
