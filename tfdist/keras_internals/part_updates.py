"""The update of a replica's own parts of variables by a Keras optimizer: clip, decay, apply, average."""

from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from tfdist.keras_internals.keras_updates import is_of_each_variable
from tfdist.keras_internals.model_state import components
from tfdist.keras_internals.optimizers import LARGE_UPDATE, OptimizerUpdate
from tfdist.keras_internals.sharded_optimizers import SplitSlots
from tfdist.keras_internals.sharded_variables import PartOfVariable, ShardedVariable, parts_of_replica
from tfdist.tensorflow_internals.operation_origins import is_symbolic
from tfdist.tensorflow_internals.shared_operations import shared_operations
from tfdist.tensorflow_internals.xla_functions import call_compiled, compiles_on_cpus

Parts = Mapping[int, tf.Tensor]

_MOST_COMPUTATIONS = 16  # XLA takes 30 to 50 ms to compile one.


class PartUpdate:
    """The update of one optimizer on one replica, of the parts that the replica owns.

    Parts are flat tensors by the position of their variable in the optimizer's list; empty ones are left out.
    """

    def __init__(self, update: OptimizerUpdate, slots: SplitSlots, local_replica: int) -> None:
        """Updates the variables of `update` on a replica of this process."""
        self._optimizer = update._optimizer
        self._strategy = update.strategy
        self._local_replica = local_replica
        replica = slots.sharding.first + local_replica
        self._spans = [slots.layout.spans(position)[replica] for position in range(len(slots.layout.sizes))]
        self._sizes = slots.layout.sizes
        self._rounded = set(slots.exact_weights)
        self._exact = {
            position: exact.parts[local_replica]
            for position, exact in slots.exact_weights.items()
            if self._spans[position].stop > self._spans[position].start
        }
        units = [unit.positions for unit in slots.layout.units]
        number = min(len(units), _MOST_COMPUTATIONS)
        self._computations = {one: index * number // len(units) for index, unit in enumerate(units) for one in unit}
        #: The positions of the variables that have a gradient.
        self.positions = [self._optimizer._get_variable_index(variable) for variable in update._variables]

    @property
    def changed(self) -> list[int]:
        """The positions of the variables that the update may change."""
        overwrites = self._optimizer.use_ema and self._optimizer.ema_overwrite_frequency
        return list(range(len(self._sizes))) if overwrites else self.positions

    @property
    def accumulators(self) -> dict[int, tf.Variable]:
        """The replica's parts of the sums of gradients, if these are split."""
        if not self._optimizer.gradient_accumulation_steps:
            return {}
        found = {position: self._optimizer._accumulated_gradients[position] for position in self.positions}
        return {
            position: accumulator.parts[self._local_replica]
            for position, accumulator in found.items()
            if isinstance(accumulator, ShardedVariable) and self._spans[position].stop > self._spans[position].start
        }

    @property
    def has_split_accumulators(self) -> bool:
        """Whether sums of gradients are split."""
        accumulators = self._optimizer._accumulated_gradients if self._optimizer.gradient_accumulation_steps else []
        return any(isinstance(accumulator, ShardedVariable) for accumulator in accumulators)

    def clip(self, parts: Parts, sum_over_replicas: Callable[[tf.Tensor], tf.Tensor]) -> Parts:
        """Clips by the norms of the whole gradients, as the optimizer's `clipnorm` or `global_clipnorm` demands.

        Args:
            parts: The parts of the gradients.
            sum_over_replicas: Sums a vector over all replicas.
        """
        optimizer = self._optimizer
        if optimizer.clipnorm and optimizer.clipnorm > 0:
            squares = dict(zip(self.positions, tf.unstack(self._squares(parts, sum_over_replicas)), strict=True))
            return {position: self._clipped_by_norm(part, squares[position]) for position, part in parts.items()}
        if optimizer.global_clipnorm and optimizer.global_clipnorm > 0:
            limit = optimizer.global_clipnorm
            norm = tf.sqrt(tf.reduce_sum(self._squares(parts, sum_over_replicas)))
            scale = limit * tf.minimum(1.0 / norm, 1.0 / limit) + (norm - norm)  # NaN if the norm is not finite
            return {position: part * tf.cast(scale, part.dtype) for position, part in parts.items()}
        if optimizer.clipvalue and optimizer.clipvalue > 0:
            limit = optimizer.clipvalue
            return {position: tf.clip_by_value(part, -limit, limit) for position, part in parts.items()}
        return parts

    def _squares(self, parts: Parts, sum_over_replicas: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
        """The sums of the squares of each whole gradient, in the order of `positions`."""
        widest = tf.float64 if any(part.dtype == tf.float64 for part in parts.values()) else tf.float32
        own = [
            tf.cast(tf.reduce_sum(tf.square(parts[position])), widest) if position in parts else tf.zeros([], widest)
            for position in self.positions
        ]
        return sum_over_replicas(tf.stack(own))

    def _clipped_by_norm(self, part: tf.Tensor, square: tf.Tensor) -> tf.Tensor:
        limit = self._optimizer.clipnorm
        square = tf.cast(square, part.dtype)
        norm = tf.where(square > 0, tf.sqrt(tf.where(square > 0, square, tf.ones_like(square))), square)
        return part * limit / tf.maximum(norm, limit)

    def apply(self, gradients: Parts, compiles: bool | None) -> dict[int, tf.Tensor]:
        """Decays and updates parts, and their moving averages; returns the new values of the parts of `changed`.

        Args:
            gradients: The parts of the gradients, clipped.
            compiles: See `OptimizerUpdate.clip_and_apply`.
        """
        compiled = [position for position in gradients if self._is_compiled(position, gradients, compiles)]
        values = self._updated_by_xla(compiled, gradients)
        others = [position for position in gradients if position not in values]
        values.update(zip(others, self._updated(others, self._inputs(others, gradients)), strict=True))
        return self._average(values) if self._optimizer.use_ema else values

    def assign(self, values: Parts) -> None:
        """Assigns whole values, flat, to the replica's copies of variables."""
        for position, value in values.items():
            variable = self._copy(position)
            variable.assign(tf.cast(tf.reshape(value, variable.shape), variable.dtype))

    def own_part(self, position: int) -> tf.Tensor:
        """Returns the present values of the replica's part of a variable; the exact ones if weights are rounded."""
        present = self._as_part(position, tf.convert_to_tensor(self._copy(position)))
        if position not in self._exact:
            return present
        exact = tf.convert_to_tensor(self._exact[position])
        return tf.where(tf.equal(tf.cast(tf.cast(exact, tf.bfloat16), exact.dtype), present), exact, present)

    def rounded(self, values: Parts) -> dict[int, tf.Tensor]:
        """Returns new values as they are sent, and keeps the exact ones if they are rounded."""
        for position, value in values.items():
            if position in self._exact:
                self._exact[position].assign(value)
        return {
            position: tf.cast(value, tf.bfloat16) if position in self._exact else value
            for position, value in values.items()
        }

    def sent_dtype(self, position: int) -> tf.DType:
        """The dtype in which new values of a variable are sent."""
        return tf.bfloat16 if position in self._rounded else self.dtype(position)

    def _as_part(self, position: int, value: tf.Tensor) -> tf.Tensor:
        """The replica's part of a whole value."""
        span = self._spans[position]
        return tf.reshape(value, [-1])[span.start : span.stop]

    def rows(self, position: int) -> int | None:
        """The first dimension of a variable; `None` if it is a scalar."""
        shape = self._copy(position).shape
        return int(shape[0]) if shape.rank else None

    def dtype(self, position: int) -> tf.DType:
        """The dtype of a variable."""
        return self._copy(position).dtype

    def _copy(self, position: int) -> tf.Variable:
        variable = self._optimizer._trainable_variables[position]
        return components(self._strategy, getattr(variable, "_value", variable))[self._local_replica]

    def _is_compiled(self, position: int, gradients: Parts, compiles: bool | None) -> bool:
        if compiles is False or not is_symbolic(gradients[position]):
            return False
        if compiles:
            return not self._optimizer.use_ema
        is_large = self._sizes[position] >= LARGE_UPDATE  # the whole variable, so that XLA rounds as without sharding
        return is_large and is_of_each_variable(self._optimizer) and compiles_on_cpus()

    def _inputs(self, positions: Sequence[int], gradients: Parts) -> list[tf.Tensor]:
        return [*(gradients[one] for one in positions), *(self.own_part(one) for one in positions)]

    def _updated_by_xla(self, positions: Sequence[int], gradients: Parts) -> dict[int, tf.Tensor]:
        """Updates by one computation for each unit, so that the first ones are gathered while others are computed."""
        found: dict[int, tf.Tensor] = {}
        by_kind: dict[tuple[int, tf.DType], list[int]] = {}
        for position in positions:
            by_kind.setdefault((self._computations[position], self.dtype(position)), []).append(position)
        for chosen in by_kind.values():

            def joined(*inputs: tf.Tensor, chosen: Sequence[int] = chosen) -> list[tf.Tensor]:
                return [tf.concat(self._updated(chosen, inputs), axis=0)]

            results = call_compiled(joined, self._inputs(chosen, gradients))
            if results is not None:
                sizes = [self._spans[position].stop - self._spans[position].start for position in chosen]
                found.update(zip(chosen, tf.split(results[0], sizes), strict=True))
        return found

    def _updated(self, positions: Sequence[int], inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the new values of parts; changes their slots."""
        optimizer = self._optimizer
        gradients, values = inputs[: len(positions)], inputs[len(positions) :]
        parts = []
        with parts_of_replica(self._local_replica), shared_operations():
            rate = optimizer.learning_rate
            for position, gradient, value in zip(positions, gradients, values, strict=True):
                variable = optimizer._trainable_variables[position]
                variable = getattr(variable, "_value", variable)
                part = PartOfVariable(value, variable)
                if optimizer.weight_decay is not None and optimizer._use_weight_decay(variable):
                    decay = tf.cast(optimizer.weight_decay, part.dtype)
                    part.assign_sub(part.value * decay * tf.cast(rate, part.dtype))
                optimizer.update_step(gradient, part, rate)
                parts.append(part)
        return [part.value for part in parts]

    def _average(self, values: dict[int, tf.Tensor]) -> dict[int, tf.Tensor]:
        """Updates the moving averages of all variables; returns the values, or in due time the averages."""
        optimizer = self._optimizer
        averages: dict[int, tf.Variable] = {}
        for position, average in enumerate(optimizer._model_variables_moving_average):
            if average is None or self._spans[position].start == self._spans[position].stop:
                continue
            value = values[position] if position in values else self.own_part(position)
            part = averages[position] = average.parts[self._local_replica]
            momentum = tf.cast(tf.not_equal(optimizer.iterations, 0), value.dtype) * optimizer.ema_momentum
            part.assign(momentum * part + (1 - momentum) * value)
        if not optimizer.ema_overwrite_frequency:
            return values
        positions = list(averages)
        present = [values[one] if one in values else self.own_part(one) for one in positions]
        chosen = tf.cond(
            tf.equal((optimizer.iterations + 1) % optimizer.ema_overwrite_frequency, 0),
            lambda: [tf.convert_to_tensor(averages[position]) for position in positions],
            lambda: present,
        )
        return dict(zip(positions, chosen, strict=True))
