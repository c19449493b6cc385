"""One update of an optimizer whose slots are split: scatter gradients, update the own part, gather what changed."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives.all_reduce import ReductionContext, sum_tensors
from tfdist.compression.gradient_tensors import all_finite
from tfdist.compression.owned_parts import OwnedParts
from tfdist.keras_internals.optimizers import OptimizerUpdate
from tfdist.keras_internals.part_updates import OwnedUpdate, PartUpdate
from tfdist.keras_internals.sharded_optimizers import SplitSlots, split_slots
from tfdist.sharded_state.exchange import PartExchange, own_part
from tfdist.sharded_state.layout import Unit
from tfdist.tensorflow_internals.merge_calls import sum_over_replicas
from tfdist.updates.clipping import clip, squares_dtype, sum_of_squares
from tfdist.updates.update_engine import WholeUpdate


class ShardedUpdate(WholeUpdate):
    """The `HeldUpdate` of one optimizer on one replica, which holds parts of the sums, and whole gradients before.

    Call its methods in their order, in the replica context.
    """

    is_whole = False

    def __init__(
        self, update: OptimizerUpdate, slots: SplitSlots, context: ReductionContext, compiles: bool | None
    ) -> None:
        super().__init__(update, context, compiles)
        self._layout, sharding = slots.layout, slots.sharding
        replica_context = tf.distribute.get_replica_context()
        self._replica = int(tf.get_static_value(replica_context.replica_id_in_sync_group))
        self._reduction = sharding.reduction(self._replica - sharding.first)
        self._replicas: list[int] = sharding.replicas
        kind = OwnedUpdate if slots.is_whole else PartUpdate
        self._parts = kind(update, slots, self._replica - sharding.first)
        self._exchange: PartExchange | None = None  # none in eager execution, where replicas only sum
        self.exchanges_micro_steps = self._parts.has_split_accumulators
        self.numbers: Sequence[int] = [self._parts.positions.index(position) for position in self._parts.owned]

    @property
    def accumulators(self) -> Sequence[tf.Variable]:
        return self._parts.accumulators if self.exchanges_micro_steps else super().accumulators

    def write(self, function: Callable[..., Any], *values: Sequence[Any]) -> None:
        if self.exchanges_micro_steps:
            self.each(function, self.accumulators, *values)
        else:
            super().write(function, *values)

    def all_finite(self, gradients: Sequence[Any]) -> tf.Tensor:
        overflows = tf.cast(tf.logical_not(all_finite(gradients)), tf.int32)
        return tf.equal(sum_over_replicas([overflows])[0], 0)

    def squares(self, gradients: Sequence[Any], *, of_parts: bool) -> Sequence[tf.Tensor | None]:
        """See `HeldParts`. All gradients are held in parts."""
        del of_parts
        dtype, by_number = squares_dtype(gradients), dict(zip(self.numbers, gradients, strict=True))
        own_squares = [
            sum_of_squares(by_number[number], dtype) if number in by_number else tf.zeros([], dtype)
            for number in range(len(self._parts.positions))
        ]
        return tf.unstack(sum_over_replicas([tf.stack(own_squares)])[0])

    def clip_and_apply(self, gradients: Sequence[Any]) -> None:
        """Clips, updates the own parts, and assigns the variables that all replicas have updated."""
        clipped = dict(zip(self._parts.owned, clip(self, gradients), strict=True))
        values = self._parts.rounded(self._parts.apply(clipped, self._compiles))
        changed = set(self._parts.changed)
        for unit in self._layout.units:
            positions = [position for position in unit.positions if position in changed]
            if positions:
                self._parts.assign(self._gathered(unit, values, positions))

    def _summed(self, gradients: Sequence[Any]) -> list[Any]:
        """Returns the own parts of the sums of gradients, dense or `tf.IndexedSlices`, over the replicas."""
        parts = self._scattered(dict(zip(self._parts.positions, gradients, strict=True)))
        return [parts[position] for position in self._parts.owned]

    def _scattered(self, gradients: dict[int, Any]) -> dict[int, tf.Tensor]:
        if tf.executing_eagerly():  # Eager replicas exchange in merge calls, which only sum.
            return self._own(dict(zip(gradients, sum_over_replicas(list(gradients.values())), strict=True)))
        if self._reduction.policy is not None:
            return self._scatter_compressed(gradients)
        group = self._reduction.gradient_group(list(gradients.values()))
        self._exchange = PartExchange(self._layout, group, self._replicas, self._replica)
        sparse, dense = {}, {}
        for position, gradient in gradients.items():
            if isinstance(gradient, tf.IndexedSlices):
                sparse[position] = gradient
            else:
                dense[position] = gradient
        contributes = self._context.contributes
        parts: dict[int, tf.Tensor] = {}
        for unit in self._layout.units:
            for gradients_of_dtype in _by_dtype(unit, dense):
                parts |= self._exchange.reduce_scatter(unit, gradients_of_dtype, contributes)
        sums = sum_tensors(list(sparse.values()), group, 0, contributes)
        return parts | self._own(dict(zip(sparse, sums, strict=True)))

    def _scatter_compressed(self, gradients: dict[int, Any]) -> dict[int, tf.Tensor]:
        group = self._reduction.gradient_group([])
        self._exchange = PartExchange(self._layout, group, self._replicas, self._replica)
        spans_of_variables = map(self._layout.spans, gradients)
        spans_of_group = tuple(tuple(spans[replica] for replica in self._replicas) for spans in spans_of_variables)
        parts = OwnedParts(spans_of_group, self._replicas.index(self._replica))
        sums = self._reduction.scatter_compressed(list(gradients.values()), parts)
        own_sums, sparse = {}, {}
        for position, summed in zip(gradients, sums, strict=True):
            if isinstance(summed, tf.IndexedSlices):
                sparse[position] = summed
            elif self._layout.spans(position)[self._replica].size:
                own_sums[position] = summed
        return own_sums | self._own(sparse)

    def _own(self, gradients: dict[int, Any]) -> dict[int, tf.Tensor]:
        return {
            position: own_part(self._layout, position, self._replica, gradient, self._parts.rows(position))
            for position, gradient in gradients.items()
            if self._layout.spans(position)[self._replica].size
        }

    def _gathered(self, unit: Unit, values: dict[int, tf.Tensor], positions: Sequence[int]) -> dict[int, tf.Tensor]:
        dtype = self._parts.sent_dtype(positions[0])
        if self._exchange is not None:
            return self._exchange.all_gather(unit, values, positions, dtype)
        padded = []
        for position in positions:
            span, size = self._layout.spans(position)[self._replica], self._layout.sizes[position]
            own_values = tf.reshape(values.get(position, tf.zeros([0], dtype)), [-1])
            padded.append(tf.pad(own_values, [[span.start, size - span.start - own_values.shape[0]]]))
        return dict(zip(positions, sum_over_replicas(padded), strict=True))


def _by_dtype(unit: Unit, gradients: dict[int, tf.Tensor]) -> list[dict[int, tf.Tensor]]:
    """Returns the gradients of a unit by dtype: users may pass other dtypes than their variables have."""
    by_dtype: dict[tf.DType, dict[int, tf.Tensor]] = {}
    for position in unit.positions:
        if position in gradients:
            by_dtype.setdefault(gradients[position].dtype, {})[position] = gradients[position]
    return list(by_dtype.values())


def held_update(update: OptimizerUpdate, context: ReductionContext, compiles: bool | None) -> WholeUpdate:
    """Returns the update of an optimizer, a `ShardedUpdate` if it has split slots; see `WholeUpdate`."""
    slots = split_slots(update.optimizer)
    if slots is None:
        return WholeUpdate(update, context, compiles)
    return ShardedUpdate(update, slots, context, compiles)
