"""What a test trains, and how: a model, an optimizer, samples, the arguments of `compile` and `fit`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from testing import models
from testing.data import NUMBERS, Data
from testing.optimizers import OPTIMIZERS


@dataclass(frozen=True)
class Program:
    """A Keras program.

    Attributes:
      model: returns the model.
      data: the samples, which are not shuffled.
      optimizer: a name in the table of optimizers, or what returns one.
      micro_steps: of an update, by the optimizer's `gradient_accumulation_steps`.
      batch_size: of the global batch of a step.
      epochs: the number of passes over the data.
      compile: further arguments of `compile`.
      fit: further arguments of `fit`.
      seed: of the initial weights.
    """

    model: Callable[[], keras.Model] = models.dense
    data: Data = NUMBERS
    optimizer: str | Callable[..., keras.optimizers.Optimizer] = "adam"
    micro_steps: int = 1
    batch_size: int = 8
    epochs: int = 2
    compile: Mapping[str, Any] = field(default_factory=dict)
    fit: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    def compiled(self, strategy: tf.distribute.Strategy) -> keras.Model:
        """Returns the model, created under a strategy."""
        accumulated = {"gradient_accumulation_steps": self.micro_steps} if self.micro_steps > 1 else {}
        optimizer = OPTIMIZERS[self.optimizer] if isinstance(self.optimizer, str) else self.optimizer
        with strategy.scope():
            keras.utils.set_random_seed(self.seed)
            model = self.model()
            model.compile(optimizer(**accumulated), **{"loss": self.data.loss, **self.compile})
        return model

    def trained(self, strategy: tf.distribute.Strategy) -> "Training":
        """Trains under a strategy."""
        model = self.compiled(strategy)
        arguments = {"epochs": self.epochs, "shuffle": False, "verbose": 0, **self.fit}
        history = model.fit(self.data.inputs, self.data.targets, batch_size=self.batch_size, **arguments).history
        return Training(self, model, history)


@dataclass(frozen=True)
class Training:
    """A program that was trained: its model, and the logs of its epochs."""

    program: Program
    model: keras.Model
    logs: dict[str, list[float]]

    def evaluated(self) -> dict[str, float]:
        """Returns the loss and the metrics of the trained model on all samples."""
        data, size = self.program.data, self.program.batch_size
        return self.model.evaluate(data.inputs, data.targets, batch_size=size, verbose=0, return_dict=True)

    @property
    def loss_scale(self) -> float:
        """The scale of the loss after the last update; 1 without one."""
        scale = getattr(self.model.optimizer, "dynamic_scale", None)
        return 1.0 if scale is None else float(scale.numpy())
