"""Joins tensors of the micro-batches to those of the batch, on one device."""

from collections.abc import Collection, Sequence
from typing import Any

import tensorflow as tf

from tfdist.model_parallel.batch_rows import MicroBatch
from tfdist.model_parallel.transfers import record_transfer


class JoinedRows:
    """The tensors of a batch that were joined in one step."""

    def __init__(self, parts: Sequence[MicroBatch], rows: int | None, device: str) -> None:
        """Starts with none.

        Args:
            parts: All micro-batches, in order.
            rows: The number of rows of the batch; None if it is not static.
            device: Where they are joined.
        """
        self._parts, self._rows, self._device = parts, rows, device
        self._joined: list[tuple[str, tf.Tensor, Sequence[tf.Tensor]]] = []

    def join(self, kind: str, of_micro_batches: Sequence[Any]) -> Any:
        """Returns the rows of the batch; None for None.

        Args:
            kind: As what `record` records them.
            of_micro_batches: By micro-batch its rows, or None.
        """
        if of_micro_batches[0] is None:
            return None
        with tf.device(self._device):
            own = [part.results(tensor) for part, tensor in zip(self._parts, of_micro_batches, strict=True)]
            tensor = tf.concat(own, 0)
            if tensor.shape[0] is None and self._rows is not None:
                tensor = tf.ensure_shape(tensor, [self._rows, *tensor.shape[1:]])
        self._joined.append((kind, tensor, of_micro_batches))
        return tensor

    def record(self, returned: Collection[tf.Tensor] = ()) -> None:
        """Records as sent what is used, or `returned` by the step. TensorFlow removes the rest from the step."""
        kept = {tensor.ref() for tensor in returned}
        for kind, tensor, of_micro_batches in self._joined:
            if tensor.ref() in kept or any(user.type != "Shape" for user in tensor.consumers()):
                for part, one in zip(self._parts, of_micro_batches, strict=True):
                    record_transfer(kind, [one], self._device, rows=part.num_rows)
