"""What the devices of a stage exchange while a stage is traced once for all of them, with the rules of gradients.

A tensor is *whole* (equal on all devices, and so is its gradient) or *split* (each device has a part). Each operation
changes one into the other, and its backward pass is the transposed rule (Shoeybi et al. 2019, "Megatron-LM").

| operation | forward | backward |
|---|---|---|
| `enter`: whole, before each device uses it in its own way | nothing | sum |
| `sum`: one summand on each device, to whole | sum | nothing |
| `gather`: split to whole | all parts | own part |
| `part`: whole to split | own part | all parts |
"""

import functools
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdist.pipeline.device_program import ExchangeRecord
from tfdist.pipeline.micro_batch_loss import current_stage_loss
from tfdist.pipeline.stage_functions import is_differentiable
from tfdist.pipeline.transfers import ACTIVATION, ACTIVATION_GRADIENT, gathered_from_shards, summed_over_shards
from tfdist.tensor_parallel.split_variable import part_size

SUM, GATHER, _SEED = "sum", "gather", "seed"
_SENDS = {SUM: summed_over_shards, GATHER: gathered_from_shards}


@dataclass(frozen=True)
class ShardExchange:
    """What a layer call exchanges by a `SUM` or `GATHER` for a micro-batch.

    The shape is that of what each device gives, in which None is the number of samples.
    """

    layer: str
    kind: str
    shape: tf.TensorShape
    dtype: tf.DType


class ShardGroup(ExchangeRecord):
    """Records the exchanges of a stage that is being traced. Each is cut there, and made by the step.

    Attributes:
        ways: The number of devices.
        layer: The name of the layer call that is being traced.
        made: The exchanges of layers, without the seeds.
    """

    def __init__(self, ways: int, graph: Any) -> None:
        super().__init__(graph)
        self.ways = ways
        self.layer = ""
        self.made: list[ShardExchange] = []
        self._is_backward = False
        self._entered: dict[int, tuple[tf.Tensor, tf.Tensor]] = {}

    def enter(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns a whole tensor for split variables. Several of them that use the same tensor share one sum."""
        layer, known = self.layer, self._entered.get(id(tensor))
        if known is not None and known[0] is tensor:
            return known[1]

        @tf.custom_gradient
        def entered(x: tf.Tensor) -> Any:
            return tf.identity(x), lambda gradient: self._record(SUM, gradient, x.shape, x.shape, layer)

        result = _marked(entered(tensor), tensor) if is_differentiable(tensor) else tensor
        self._entered[id(tensor)] = tensor, result
        return result

    def sum(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns the sum over the devices."""

        @tf.custom_gradient
        def summed(x: tf.Tensor) -> Any:
            return self._record(SUM, x, x.shape, x.shape), tf.identity

        return _marked(summed(tensor), tensor)

    def gather(self, tensor: tf.Tensor, axis: int, size: int | None = None, *, has_samples: bool = True) -> tf.Tensor:
        """Returns the whole tensor of a split one.

        `size` is that of the whole `axis`, if it is padded. The value of a variable has no samples.
        """
        if not is_differentiable(tensor):
            return _marked(self._gathered(tensor, axis, size), tensor)

        @tf.custom_gradient
        def gathered(x: tf.Tensor) -> Any:
            whole = self._gathered(x, axis, size)

            def own(gradient: tf.Tensor) -> tf.Tensor:
                gradient = tf.convert_to_tensor(gradient)  # of a lookup it has rows
                gradient.set_shape(whole.shape)
                return self._own(gradient, axis)

            return whole, own

        return _marked(gathered(tensor), tensor) if has_samples else gathered(tensor)

    def part(self, tensor: tf.Tensor, axis: int, *, has_samples: bool = True) -> tf.Tensor:
        """Returns this device's part of a whole tensor, padded by zeros; `has_samples` is as that of `gather`."""
        if not is_differentiable(tensor):
            return _marked(self._own(tensor, axis), tensor)

        layer = self.layer

        @tf.custom_gradient
        def own(x: tf.Tensor) -> Any:
            part = self._own(x, axis)
            return part, lambda gradient: self._gathered(gradient, axis, x.shape[axis], part.shape, layer)

        return _marked(own(tensor), tensor) if has_samples else own(tensor)

    def real(self, tensor: tf.Tensor, axis: int, size: int | None, fill: float = 0.0) -> tf.Tensor:
        """Returns a part with `fill` in place of what pads an axis, whose size is `size` on all devices together."""
        position = axis % tensor.shape.rank
        own = tensor.shape[position]
        if size is None or own * self.ways == size:
            return tensor
        shape = [-1 if index == position else 1 for index in range(tensor.shape.rank)]
        is_real = tf.reshape(self.own_rank() * own + tf.range(own) < size, shape)
        return tf.where(is_real, tensor, tf.constant(fill, tensor.dtype))

    def seed(self, target: tf.Tensor) -> tf.Tensor:
        """Returns the gradient of the loss with respect to `target`, which the backward pass is given."""
        return self._record(_SEED, target, target.shape, target.shape)

    def _gathered(
        self, tensor: tf.Tensor, axis: int, size: int | None = None, shape: Any = None, layer: str = ""
    ) -> tf.Tensor:
        shape = tensor.shape if shape is None else shape
        parts = self._record(GATHER, tensor, shape, [self.ways, *shape], layer)
        whole = tf.concat(tf.unstack(parts, num=self.ways), axis)
        position = axis % whole.shape.rank
        if size is None or whole.shape[position] in (None, size):
            return whole
        return whole[tuple(slice(size if index == position else None) for index in range(whole.shape.rank))]

    def _own(self, tensor: tf.Tensor, axis: int) -> tf.Tensor:
        position = axis % tensor.shape.rank
        size = part_size(tensor.shape[position], self.ways)
        if padding := size * self.ways - tensor.shape[position]:
            tensor = tf.pad(tensor, [[0, padding if index == position else 0] for index in range(tensor.shape.rank)])
        begin = [self.own_rank() * size if index == position else 0 for index in range(tensor.shape.rank)]
        extent = [size if index == position else -1 for index in range(tensor.shape.rank)]
        result = tf.slice(tensor, begin, extent)
        result.set_shape([size if index == position else length for index, length in enumerate(tensor.shape)])
        return result

    def _record(self, kind: str, tensor: tf.Tensor, shape: Any, of_received: Any, layer: str = "") -> tf.Tensor:
        self._is_backward |= kind == _SEED
        send = None
        if kind != _SEED:
            send = functools.partial(_SENDS[kind], kind=ACTIVATION_GRADIENT if self._is_backward else ACTIVATION)
        received = self.add(
            tensor,
            shape,
            of_received,
            send,
            "Devices of a stage cannot exchange tensors within a condition, a loop or a rematerialized layer. "
            f"Received: a split layer whose {kind} is there. Expected: split layers outside of them. Remove the "
            "variables of this layer from the layout map.",
        )
        if send is not None:
            self.made.append(ShardExchange(layer or self.layer, kind, tf.TensorShape(shape), received.dtype))
        return received


def _marked(result: tf.Tensor, tensor: tf.Tensor) -> tf.Tensor:
    """Notes for losses of layers, which are followed to the samples, that each sample is made from the same one."""
    if (loss := current_stage_loss()) is not None:
        loss.mark_samples(result, tensor)
    return result
