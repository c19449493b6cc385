"""One update of an optimizer whose slots are split: scatter gradients, update the own part, gather what changed."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives.all_reduce import ReductionContext, sum_tensors
from tfdist.collectives.exchange_timer import begin_bucket, end_bucket
from tfdist.compression import Group
from tfdist.compression.gradient_tensors import all_finite, flatten, zeros_unless
from tfdist.compression.owned_parts import OwnedParts
from tfdist.keras_internals.optimizers import OptimizerUpdate
from tfdist.keras_internals.part_updates import OwnedUpdate, PartUpdate
from tfdist.keras_internals.sharded_optimizers import SplitSlots, split_slots
from tfdist.sharded_state.layout import SpanLayout, Unit
from tfdist.tensorflow_internals.function_graphs import user_line
from tfdist.tensorflow_internals.merge_calls import sum_over_replicas
from tfdist.tensorflow_internals.sent_dtypes import from_words, to_words
from tfdist.updates.clipping import clip, squares_dtype, sum_of_squares
from tfdist.updates.update_engine import WholeUpdate

# The collection of a graph with the replica's parts of sums of gradients of weights in parts.
PARTS_OF_SUMS = "tfdist_parts_of_sums"
# Operations by which programs clip and normalize gradients. Of a part they give something else than of the whole.
_OF_LOCAL_GRADIENTS = frozenset(
    {"ClipByValue", "EuclideanNorm", "L2Loss", "Max", "Maximum", "Mean", "Min", "Minimum", "Sign", "Sum"}
)
Tensors = Mapping[int, tf.Tensor]  # by the position of the variable


class PartExchange:
    """Exchanges the units of a layout over a group of all replicas.

    Each gets the sums of its part, and later the new values of all parts.
    """

    def __init__(self, layout: SpanLayout, group: Group, replicas: list[int], replica: int) -> None:
        """`replicas` are the numbers of the replicas at each position of the group, `replica` is that of this one."""
        self._layout, self._group, self._replicas, self._replica = layout, group, replicas, replica

    def reduce_scatter(self, unit: Unit, gradients: Tensors, contributes: tf.Tensor | None) -> dict[int, tf.Tensor]:
        """Sums dense gradients of a unit, or of some of its variables; a replica gets the part that it owns.

        A replica of N sends `(N - 1) / N` of the gradients; zeros if the bool scalar `contributes` is false. Where the
        group has no reduce-scatter, as between CPUs of a process, it takes its part of the whole sum.

        Returns the sums of this replica's spans that are not empty, flat.
        """
        layout = self._layout
        present = [position for position in unit.positions if position in gradients]
        if not present:
            return {}
        timed, members = begin_bucket(self._group, [gradients[position] for position in present])
        sizes = [layout.sizes[position] for position in present]
        if not timed.adds_rows or self._is_sum_shorter(unit, present):
            (vector,) = end_bucket(timed, [timed.sum(zeros_unless(contributes, flatten(members)))])
            vectors = dict(zip(present, tf.split(vector, sizes), strict=True))
            spans = {position: layout.spans(position)[self._replica] for position in present}
            return {
                position: vectors[position][span.start : span.stop] for position, span in spans.items() if span.size
            }
        if unit.is_divided and len(present) == len(unit.positions):
            length = unit.part_length
            missing = layout.replicas * length - sum(sizes)  # `flatten` adds the padding: one copy, or none.
            padded = [*members, tf.zeros([missing], members[0].dtype)] if missing else members
            rows = tf.reshape(zeros_unless(contributes, flatten(padded)), [layout.replicas, length])
            if self._replicas != list(range(layout.replicas)):
                rows = tf.gather(rows, self._replicas)
        else:
            length = self._longest(present)
            vectors = dict(zip(present, tf.split(zeros_unless(contributes, flatten(members)), sizes), strict=True))
            rows = tf.stack([_padded(self._part(vectors, present, owner), length) for owner in self._replicas])
        (total,) = end_bucket(timed, [timed.reduce_scatter(rows)])
        return self._split(total, present, self._replica)

    def all_gather(self, unit: Unit, parts: Tensors, positions: Sequence[int], dtype: tf.DType) -> dict[int, tf.Tensor]:
        """Gathers the parts of variables of a unit, whose `positions` are equal on all replicas; returns them flat.

        A replica of N sends `(N - 1) / N` of the variables. `parts` are the values of its spans that are not empty.
        """
        layout = self._layout
        if self._is_sum_shorter(unit, positions):
            return self._sum_of_words(parts, positions, dtype)
        own_parts = [parts[position] for position in positions if position in parts]
        is_complete = unit.is_divided and len(positions) == len(unit.positions)
        length = unit.part_length if is_complete else self._longest(positions)
        row = _padded(flatten(own_parts) if own_parts else tf.zeros([0], dtype), length)
        timed, (row,) = begin_bucket(self._group, [row])
        gathered = timed.gather(to_words(row[tf.newaxis]))
        (rows,) = end_bucket(timed, [from_words(gathered, dtype, layout.replicas, length)])
        sizes = [layout.sizes[position] for position in positions]
        if is_complete:
            if self._replicas != list(range(layout.replicas)):
                rows = tf.gather(rows, [self._replicas.index(owner) for owner in range(layout.replicas)])
            vector, missing = tf.reshape(rows, [-1]), layout.replicas * length - sum(sizes)
            if len(sizes) == 1 and not missing:
                return {positions[0]: vector}
            return dict(zip(positions, tf.split(vector, [*sizes, missing]), strict=False))
        parts_by_position: dict[int, list[tf.Tensor]] = {position: [] for position in positions}
        for owner in range(layout.replicas):
            split = self._split(rows[self._replicas.index(owner)], positions, owner)
            for position, part in split.items():
                parts_by_position[position].append(part)
        return {position: flatten(of_owners) for position, of_owners in parts_by_position.items()}

    def _is_sum_shorter(self, unit: Unit, positions: Sequence[int]) -> bool:
        """Whether an all-reduce sends less than parts of whole variables, which are filled up to the longest one."""
        # Of N replicas, each sends 2 (N - 1) / N of the total, or N - 1 parts of the longest one's length.
        total = sum(self._layout.sizes[position] for position in positions)
        return not unit.is_divided and self._layout.replicas * self._longest(positions) > 2 * total

    def _sum_of_words(self, parts: Tensors, positions: Sequence[int], dtype: tf.DType) -> dict[int, tf.Tensor]:
        """Gathers whole variables by a sum of bits, in which a replica sends zeros for those that it does not own."""
        sizes = [self._layout.sizes[position] for position in positions]
        own_or_zeros = [
            tf.reshape(parts[position], [-1]) if position in parts else tf.zeros([size], dtype)
            for position, size in zip(positions, sizes, strict=True)
        ]
        timed, members = begin_bucket(self._group, own_or_zeros)
        words = timed.sum(to_words(flatten(members)[tf.newaxis])[0])
        (vector,) = end_bucket(timed, [from_words(words[tf.newaxis], dtype, 1, sum(sizes))[0]])
        return dict(zip(positions, tf.split(vector, sizes), strict=True))

    def _longest(self, positions: Sequence[int]) -> int:
        spans = [self._layout.spans(position) for position in positions]
        return max(sum(of_variable[replica].size for of_variable in spans) for replica in range(self._layout.replicas))

    def _part(self, vectors: Tensors, positions: Sequence[int], replica: int) -> tf.Tensor:
        spans = [(vectors[position], self._layout.spans(position)[replica]) for position in positions]
        return flatten([vector[span.start : span.stop] for vector, span in spans])

    def _split(self, row: tf.Tensor, positions: Sequence[int], replica: int) -> dict[int, tf.Tensor]:
        """Splits the part of `replica` into its spans."""
        span_values, start = {}, 0
        for position in positions:
            size = self._layout.spans(position)[replica].size
            if size:
                span_values[position] = row[start : start + size]
                start += size
        return span_values


def own_part(
    layout: SpanLayout, position: int, replica: int, gradient: tf.Tensor | tf.IndexedSlices, rows: int | None
) -> tf.Tensor:
    """Returns the values of the span of `replica` of a whole gradient, flat.

    `rows` is the first dimension of the variable, `None` if it is a scalar.
    """
    span = layout.spans(position)[replica]
    if not isinstance(gradient, tf.IndexedSlices):
        return tf.reshape(gradient, [-1])[span.start : span.stop]
    row = layout.sizes[position] // (rows or 1)
    first, last = span.start // row, -(-span.stop // row)
    is_own = (gradient.indices >= first) & (gradient.indices < last)
    values = tf.reshape(tf.boolean_mask(gradient.values, is_own), [-1, row])
    rows = tf.boolean_mask(gradient.indices, is_own) - first
    dense = tf.reshape(tf.math.unsorted_segment_sum(values, rows, last - first), [-1])
    return tf.ensure_shape(dense[span.start - first * row : span.stop - first * row], [span.size])


def _padded(vector: tf.Tensor, length: int) -> tf.Tensor:
    missing = length - int(vector.shape[0])
    return tf.pad(vector, [[0, missing]]) if missing else vector


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
        self._parts.assign_parts(values)
        changed = {position for position in self._parts.changed if not self._parts.is_in_parts(position)}
        for unit in self._layout.units:
            positions = [position for position in unit.positions if position in changed]
            if positions:
                self._parts.assign(self._gathered(unit, values, positions))

    def _summed(self, gradients: Sequence[Any]) -> list[Any]:
        """Returns the own parts of the sums of gradients, dense or `tf.IndexedSlices`, over the replicas."""
        sums: dict[int, tf.Tensor] = {}
        whole: dict[int, Any] = {}
        for position, gradient in zip(self._parts.positions, gradients, strict=True):
            # Backpropagation has summed those of weights in parts, where it has computed them.
            (sums if self._parts.is_in_parts(position) else whole)[position] = gradient
        if not tf.executing_eagerly():
            _check_are_linear({self._parts.path(position): gradient for position, gradient in sums.items()})
        parts = sums | self._scattered(whole)
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


def _check_are_linear(gradients: Mapping[str, tf.Tensor]) -> None:
    """Raises an error if a program has clipped or normalized gradients of which each replica has parts of the sums."""
    sums = tf.compat.v1.get_collection(PARTS_OF_SUMS)
    reached: set[Any] = set()
    waiting = list(sums)
    while waiting:
        new = set(waiting.pop().consumers()) - reached
        reached |= new
        waiting += [output for operation in new for output in operation.outputs]
    seen = {part.ref() for part in sums}
    of_paths = list(gradients.items())
    while of_paths:
        path, tensor = of_paths.pop()
        operation = tensor.op
        if tensor.ref() in seen or operation not in reached:
            continue
        seen.add(tensor.ref())
        if operation.type in _OF_LOCAL_GRADIENTS:
            raise ValueError(
                "The gradient of a weight in parts is the replica's part of the sum over all replicas, so a program "
                f"cannot clip or normalize it. Received: a gradient of {path!r}, changed in {user_line(tensor)}. "
                "Expected: gradients as the tape returns them, times factors. Let the optimizer clip them "
                "(`clipnorm`, `global_clipnorm`, `clipvalue`), or create the strategy with "
                "`shard_optimizer_state=True` alone."
            )
        # Of what passes together through one operation only the gradient matters.
        is_bundle = operation.type == "IdentityN"
        given = [operation.inputs[tensor.value_index]] if is_bundle else operation.inputs
        of_paths += [(path, one) for one in given]
