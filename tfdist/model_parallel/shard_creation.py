"""Creates split variables and their slots in parts, before it is known to which stage they belong."""

from collections.abc import Sequence

import tensorflow as tf

from tfdist.keras_internals.created_parts import NewValue
from tfdist.keras_internals.placed_variables import identity_of
from tfdist.model_parallel.shard_layout import ShardLayout
from tfdist.tensorflow_internals.placed_strategy import PlacedExtended
from tfdist.tensorflow_internals.split_variables import NewVariable, ShardedVariable


class ShardCreation:
    """Creates the variables that a layout splits on the devices of one stage. `ShardColumns` moves them later.

    The initial value of a variable is computed once, on one of these devices, and sent in parts; constants, as those of
    slots, are computed in parts. So a device holds one complete variable at most, while it is created.
    """

    def __init__(self, layout: ShardLayout, devices: Sequence[Sequence[str]], extended: PlacedExtended) -> None:
        """Prepares the creation.

        Args:
            layout: Which variables are split.
            devices: By column and stage.
            extended: Where other variables are created.
        """
        self._layout, self._extended = layout, extended
        self._groups = {stages[0]: list(stages) for stages in zip(*devices[: layout.ways], strict=True)}

    def __call__(self, new: NewValue) -> ShardedVariable | None:
        """Returns a new variable in parts, or None if it is not split."""
        beside = self._extended.beside
        if beside is not None:
            if not isinstance(beside, ShardedVariable) or tuple(beside.shape) != new.shape:
                return None
            group, axis = [shard.device for shard in beside.shards[: self._layout.ways]], beside.axis
        else:
            found = self._axis(new)
            if found is None:
                return None
            group, axis = self._groups[self._extended.device_of_next()], found
        whole = NewVariable(new.shape, group[0], new.value, new.is_constant, **new.options)
        with tf.init_scope():
            variable = ShardedVariable(whole, axis, [group], is_slot=beside is not None)
        if beside is not None:
            self._extended.colocated_with[identity_of(variable)] = identity_of(beside)
        elif (size := variable.shards[0].shape.num_elements()) is not None:
            self._extended.count_bytes(group[0], size * variable.dtype.size)
        return variable

    def _axis(self, new: NewValue) -> int | None:
        try:
            return self._layout.axis_at(new.path, new.shape)
        except ValueError:  # which the first step raises if a stage uses the variable
            return None
