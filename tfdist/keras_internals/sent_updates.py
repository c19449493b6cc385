"""Optimizers whose gradients are decoded where the variables are."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdist.keras_internals.symbols import TFOptimizer


@dataclass(frozen=True)
class SentGradient:
    """A gradient on its way: `tensors`, and what makes the gradient of them at its variable."""

    tensors: list[tf.Tensor]
    decode: Callable[[Sequence[tf.Tensor]], Any]


def install_sent_updates() -> None:
    """Makes optimizers take `SentGradient`s, which are decoded on the device of their variable."""
    stock = TFOptimizer._distributed_tf_update_step

    @functools.wraps(stock)
    def update_where_decoded(self: Any, distribution: Any, grads_and_vars: Any, learning_rate: Any) -> None:
        pairs = list(grads_and_vars)
        if not any(isinstance(gradient, SentGradient) for gradient, _ in pairs):
            return stock(self, distribution, pairs, learning_rate)
        for gradient, variable in pairs:

            def update(variable: Any, rate: Any, *tensors: tf.Tensor, sent: SentGradient = gradient) -> None:
                self.update_step(sent.decode(tensors), variable, rate)

            distribution.extended.update(variable, update, args=(learning_rate, *gradient.tensors), group=False)
        return None

    TFOptimizer._distributed_tf_update_step = update_where_decoded
