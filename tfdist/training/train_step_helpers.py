"""Functions for a `train_step` that scales its loss itself."""

from typing import Any

from tfdist.keras_internals.keras_symbols import losses


def scale_loss_for_distribution(loss: Any) -> Any:
    """Scales a mean over a replica's samples so that the sum over the replicas is the mean over the global batch.

    tfdist scales the losses of Keras, `self.compute_loss`, and the means and sums of a `train_step` itself. Use this
    for a loss that it cannot follow, of which it warns: one that is computed in a `tf.function`, a condition or a loop
    of the step, or with `run_eagerly=True`.

    Args:
        loss: The mean over the samples that this replica was given, a float scalar.

    Returns:
        `loss` multiplied by the replica's fraction of the samples, a scalar. Without a strategy, and in a layer's
        `call`, `loss` itself.

    >>> import tensorflow as tf
    >>> scale_loss_for_distribution(tf.constant(2.0)).numpy()
    np.float32(2.0)
    """
    return losses.scale_loss_for_distribution(loss)


def unscale_loss_for_distribution(loss: Any) -> Any:
    """Returns the mean over a replica's samples from a scaled loss: the inverse of `scale_loss_for_distribution`.

    `keras.metrics.Mean`, `Sum` and the logs that a step returns do not need it. Use it for a loss of Keras in metrics
    of another class, and in computations other than sums.

    Args:
        loss: A scaled loss, a float scalar: the result of a Keras loss, of `self.compute_loss` or of
            `scale_loss_for_distribution`.

    Returns:
        A scalar, whose mean over the replicas, weighted by samples, is the loss of the global batch.

    >>> import tensorflow as tf
    >>> unscale_loss_for_distribution(tf.constant(2.0)).numpy()
    np.float32(2.0)
    """
    return losses.unscale_loss_for_distribution(loss)
