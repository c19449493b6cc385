"""One update of an optimizer whose slots are split: scatter gradients, update the own part, gather what changed."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives.all_reduce import ReductionContext, sum_tensors
from tfdist.compression import Group
from tfdist.compression.gradient_tensors import all_finite
from tfdist.compression.owned_parts import OwnedParts
from tfdist.keras_internals.optimizers import OptimizerUpdate
from tfdist.keras_internals.owned_updates import OwnedUpdate
from tfdist.keras_internals.part_updates import PartUpdate
from tfdist.keras_internals.sharded_optimizers import SplitSlots, split_slots_of
from tfdist.sharded_state.exchange import all_gather, own_part, reduce_scatter
from tfdist.sharded_state.layout import Unit
from tfdist.tensorflow_internals.merge_calls import sum_over_replicas


class ShardedUpdate:
    """The update of one optimizer on one replica. Call its methods in their order, in the replica context."""

    def __init__(self, update: OptimizerUpdate, slots: SplitSlots) -> None:
        self._slots, self._layout, sharding = slots, slots.layout, slots.sharding
        context = tf.distribute.get_replica_context()
        self._replica = int(tf.get_static_value(context.replica_id_in_sync_group))
        self._reduction = sharding.reduction(self._replica - sharding.first)
        self._replicas: Sequence[int] = sharding.replicas
        kind = OwnedUpdate if slots.is_whole else PartUpdate
        self._parts = kind(update, slots, self._replica - sharding.first)
        self._group: Group | None = None

    def scatter(self, gradients: Sequence[Any], context: ReductionContext) -> dict[int, tf.Tensor]:
        """Sums gradients over the replicas; returns the own parts of the sums.

        Args:
            gradients: Dense or `tf.IndexedSlices`, in the order of the variables of the update.
            context: Marked as one of gradients.
        """
        by_position = dict(zip(self._parts.positions, gradients, strict=True))
        if tf.executing_eagerly():  # replicas meet in merge calls, which have sums alone
            return self._own(dict(zip(by_position, sum_over_replicas(gradients), strict=True)))
        if self._reduction.policy is not None:
            return self._scatter_compressed(by_position)
        self._group = group = self._reduction.gradient_group(gradients)
        sparse = {position: one for position, one in by_position.items() if isinstance(one, tf.IndexedSlices)}
        dense = {position: one for position, one in by_position.items() if position not in sparse}
        parts: dict[int, tf.Tensor] = {}
        for unit in self._layout.units:
            for given in _by_dtype(unit, dense):
                own = reduce_scatter(
                    self._layout, unit, given, group, self._replicas, self._replica, context.contributes
                )
                parts.update(own)
        sums = sum_tensors(list(sparse.values()), group, 0, context.contributes)
        return parts | self._own(dict(zip(sparse, sums, strict=True)))

    def _scatter_compressed(self, gradients: dict[int, Any]) -> dict[int, tf.Tensor]:
        self._group = self._reduction.gradient_group([])
        spans = [self._layout.spans(position) for position in gradients]
        by_rank = tuple(tuple((of[one].start, of[one].stop) for one in self._replicas) for of in spans)
        parts = OwnedParts(by_rank, list(self._replicas).index(self._replica))
        sums = self._reduction.scatter_compressed(list(gradients.values()), parts)
        found = dict(zip(gradients, sums, strict=True))
        sparse = {position: one for position, one in found.items() if isinstance(one, tf.IndexedSlices)}
        own = {
            position: one
            for position, one in found.items()
            if position not in sparse and self._layout.spans(position)[self._replica].size
        }
        return own | self._own(sparse)

    @property
    def has_split_accumulators(self) -> bool:
        """Whether the sums of gradients are split, so that every micro-step has to `scatter` its gradients."""
        return self._parts.has_split_accumulators

    def accumulate(self, parts: dict[int, tf.Tensor]) -> None:
        """Adds a result of `scatter` to the own parts of the sums."""
        for position, accumulator in self._parts.accumulators.items():
            accumulator.assign_add(_like(accumulator, parts[position]))

    def accumulated(self, parts: dict[int, tf.Tensor] | None = None) -> dict[int, tf.Tensor]:
        """Returns the own parts of the sums, flat, with `parts` added."""
        totals = {}
        for position, accumulator in self._parts.accumulators.items():
            total = tf.convert_to_tensor(accumulator)
            totals[position] = tf.reshape(total if parts is None else total + _like(accumulator, parts[position]), [-1])
        return totals

    def reset_accumulators(self) -> None:
        """Sets the own parts of the sums to zero."""
        for accumulator in self._parts.accumulators.values():
            accumulator.assign(tf.zeros_like(accumulator))

    def all_finite(self, parts: dict[int, tf.Tensor]) -> tf.Tensor:
        """Returns whether all values of the gradients of all replicas are finite, a bool scalar."""
        overflows = tf.cast(tf.logical_not(all_finite(list(parts.values()))), tf.int32)
        return tf.equal(sum_over_replicas([overflows])[0], 0)

    def clip_and_apply(self, parts: dict[int, tf.Tensor], compiles: bool | None) -> None:
        """Clips, updates the own parts, and assigns the variables that all replicas have updated.

        Args:
            parts: The result of `scatter`.
            compiles: See `OptimizerUpdate.clip_and_apply`.
        """
        clipped = self._parts.clip(parts, lambda squares: sum_over_replicas([squares])[0])
        values = self._parts.rounded(self._parts.apply(clipped, compiles))
        changed = set(self._parts.changed)
        for unit in self._layout.units:
            positions = [position for position in unit.positions if position in changed]
            if positions:
                self._parts.assign(self._gathered(unit, values, positions))

    def _own(self, gradients: dict[int, Any]) -> dict[int, tf.Tensor]:
        return {
            position: own_part(self._layout, position, self._replica, gradient, self._parts.rows(position))
            for position, gradient in gradients.items()
            if self._layout.spans(position)[self._replica].size
        }

    def _gathered(self, unit: Unit, values: dict[int, tf.Tensor], positions: Sequence[int]) -> dict[int, tf.Tensor]:
        dtype = self._parts.sent_dtype(positions[0])
        if self._group is not None:
            return all_gather(self._layout, unit, values, positions, self._group, self._replicas, dtype)
        padded = []
        for position in positions:
            span, size = self._layout.spans(position)[self._replica], self._layout.sizes[position]
            own = tf.reshape(values.get(position, tf.zeros([0], dtype)), [-1])
            padded.append(tf.pad(own, [[span.start, size - span.start - own.shape[0]]]))
        return dict(zip(positions, sum_over_replicas(padded), strict=True))


def _like(variable: tf.Variable, part: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.reshape(part, variable.shape), variable.dtype)


def _by_dtype(unit: Unit, gradients: dict[int, tf.Tensor]) -> list[dict[int, tf.Tensor]]:
    """The gradients of a unit, those of one dtype together: users may pass others than their variables have."""
    found: dict[tf.DType, dict[int, tf.Tensor]] = {}
    for position in unit.positions:
        if position in gradients:
            found.setdefault(gradients[position].dtype, {})[position] = gradients[position]
    return list(found.values())


def sharded_update(update: OptimizerUpdate) -> ShardedUpdate | None:
    """Returns the update of an optimizer with split slots; `None` if its slots are whole, or if it has none."""
    slots = split_slots_of(update)
    return None if slots is None else ShardedUpdate(update, slots)
