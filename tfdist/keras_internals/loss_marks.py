"""Notes what is known of values that Keras computes, where their operations do not show it."""

import functools
from collections.abc import Callable
from typing import Any

import keras

from tfdist.keras_internals.loss_scaling import LossStep


def patch_layer_outputs(current_step: Callable[[], LossStep | None]) -> None:
    """Makes batch normalization and scaled losses known to `current_step()` while a step is running.

    Normalized samples count as values of these samples alone: the statistics of a batch are those of the replica, which
    Keras documents, or those of all replicas. A scaled loss in a mixed precision is the loss.

    May be called more than once, for different steps.
    """
    normalize, scale_loss = keras.layers.BatchNormalization.call, keras.optimizers.LossScaleOptimizer.scale_loss

    @functools.wraps(normalize)
    def normalize_samples(self: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        step, outputs = current_step(), normalize(self, inputs, *args, **kwargs)
        if step is not None:
            step.mark_samples(outputs, inputs)
        return outputs

    @functools.wraps(scale_loss)
    def scale_known_loss(self: Any, loss: Any) -> Any:
        step, scaled = current_step(), scale_loss(self, loss)
        return scaled if step is None else step.mark_like(scaled, loss)

    keras.layers.BatchNormalization.call = normalize_samples
    keras.optimizers.LossScaleOptimizer.scale_loss = scale_known_loss
