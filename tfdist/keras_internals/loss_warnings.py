"""Warns of losses of a step that may not add up over the replicas to that of one process: once each, with the line."""

import warnings

import tensorflow as tf

from tfdist.tensorflow_internals.operation_origins import describe, is_of_keras

_warned: set[str] = set()


class LossWarnings:
    """Each warning is given once in a process."""

    def of_unknown_loss(self, tensor: tf.Tensor, *, is_part: bool) -> None:
        """A loss is not linear in the samples, or is not followed."""
        meant = "a part of the loss, because it contains one" if is_part else "a mean over the replica's samples"
        self._warn(
            "A loss is neither a mean nor a sum over the replica's samples as far as tfdist can see, so the replicas' "
            f"losses may not add up to that of one process. It counts as {meant}. Received: {describe(tensor)}. "
            "Expected: means (`tf.reduce_mean`), sums, losses of Keras, and sums of these. Pass the mean over the "
            "replica's samples to "
            "`tfdist.training.scale_loss_for_distribution` in that line, and combine the result by sums and constant "
            "factors only."
        )

    def of_eager_loss(self) -> None:
        """A loss is computed eagerly by other means than those of Keras."""
        self._warn(
            "A step computes a loss eagerly and not by the losses of Keras alone, so tfdist cannot see whether it is a "
            "mean over the replica's samples, and its gradients may not add up to those of one process. "
            "Received: run_eagerly=True. Expected: a traced step, or a scaled loss. Compile with `run_eagerly=False`, "
            "or pass each mean to `tfdist.training.scale_loss_for_distribution`, and the losses to `tape.gradient` in "
            "a list."
        )

    def of_ambiguous_constant(self, tensor: tf.Tensor) -> None:
        """A sum over the samples is divided by a number that may be, or contain, the number of samples.

        Keras itself divides by the number of samples, as for `activity_regularizer`.
        """
        if is_of_keras(tensor):
            return
        self._warn(
            "A sum over the samples is divided by a number that equals the number of a replica's samples, or a "
            "multiple of it, so tfdist cannot see whether a mean or a sum is meant: an equal number counts as the "
            f"mean, a multiple as the sum. Received: {describe(tensor)}. Expected: `tf.reduce_mean`, or a division "
            "by `tf.shape(x)[0]`, for a mean."
        )

    def of_division_by_replicas(self, tensor: tf.Tensor, replicas: int, *, is_scaled: bool) -> None:
        """A mean is divided by a number that equals that of the replicas, and was not read from the strategy."""
        meant = "a mean that is scaled for them" if is_scaled else "a mean of this size in one process, too"
        self._warn(
            f"A loss of the program multiplies a mean by 1/{replicas}, and there are {replicas} replicas: tfdist "
            f"scales means itself, and takes this for {meant}. Received: {describe(tensor)}. Expected: the loss of one "
            "process. If the factor stands for the number of replicas, remove it, or write "
            "`loss / strategy.num_replicas_in_sync`."
        )

    def _warn(self, message: str) -> None:
        if message not in _warned:
            _warned.add(message)
            warnings.warn(message, stacklevel=5)
