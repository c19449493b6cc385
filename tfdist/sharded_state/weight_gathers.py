"""Weights of which each replica holds a part: gathered before a layer computes, freed, and gathered again.

Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", stage 3. There
a layer's backward pass calls hooks; in a graph the operations that backpropagation adds are moved to what is gathered
again, so that nothing keeps the weights of the forward pass.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.compression.gradient_tensors import zeros_unless
from tfdist.keras_internals.keras_symbols import get_mask, set_mask
from tfdist.keras_internals.placed_variables import NewValue
from tfdist.keras_internals.split_weight import (
    SplitWeight,
    computed_dtypes,
    is_rematerialized,
    split_weight,
    with_gathered,
)
from tfdist.sharded_state.layout import SpanLayout, Unit, equal_spans
from tfdist.sharded_state.sharded_update import PARTS_OF_SUMS, PartExchange
from tfdist.sharded_state.state_sharding import StateSharding
from tfdist.tensorflow_internals.function_graphs import count_writes, is_symbolic
from tfdist.tensorflow_internals.moved_consumers import Derived
from tfdist.tensorflow_internals.operation_order import outside_of_conditions

# Smaller weights stay whole on each replica: they are little memory, and each exchange takes time.
SMALLEST_SPLIT = 2**14  # values
_IN_GRAPH = "tfdist_gathers"


class WeightGathers:
    """Splits the weights that are created under one strategy, and gathers them in its steps."""

    def __init__(
        self,
        sharding: StateSharding,
        bucket_bytes: int,
        broadcast: Callable[[tf.Tensor], tf.Tensor],
        has_samples: Callable[[], Any],
    ) -> None:
        """Splits as `sharding` splits slots.

        `broadcast` returns the value of worker 0, for initial values. `has_samples` says whether this replica has
        samples in the step that is traced, a bool or a bool scalar; `None` outside of a step.
        """
        self._sharding, self._bucket_bytes = sharding, bucket_bytes
        self._broadcast, self._has_samples = broadcast, has_samples

    def create(self, new: NewValue) -> tf.Variable | None:
        """Returns what holds a weight in parts, or `None` if it stays whole."""
        size = int(new.shape.num_elements() or 0)
        if not new.trainable or size < SMALLEST_SPLIT or not new.dtype.is_floating:
            return None
        sharding = self._sharding
        bounds = [(span.start, span.stop) for span in equal_spans(size, len(sharding.replicas))]
        with tf.init_scope(), tf.device("CPU:0"):  # also in the step that builds a layer when it calls it
            value = self._broadcast(new.read_value())
            return split_weight(new, self, value, bounds, sharding.devices, sharding.first, sharding.gather)

    def local_replica(self) -> int:
        """See `Gathers`. Outside of replicas the first one."""
        context = tf.distribute.get_replica_context()
        if context is None:
            return 0
        return int(tf.get_static_value(tf.convert_to_tensor(context.replica_id_in_sync_group))) - self._sharding.first

    def call_layer(self, layer: Any, weights: Sequence[SplitWeight], call: Callable[..., Any], inputs: Any) -> Any:
        """See `Gathers`."""
        graph = tf.compat.v1.get_default_graph()
        with outside_of_conditions([weight.part for weight in weights]):
            is_in_branch = tf.compat.v1.get_default_graph() is not graph
            values = self._values(weights, computed_dtypes(layer, weights)) if is_in_branch else []
        if not is_in_branch:
            return LayerCall(self._of_graph(), layer, weights).run(call, inputs)
        with with_gathered(weights, values):
            return call(*inputs[0], **inputs[1])

    def read(self, weight: SplitWeight) -> tf.Tensor:
        """See `Gathers`."""
        with outside_of_conditions([weight.part]):
            (value,) = self._values([weight], [weight.part.dtype])
        return value

    def _values(self, weights: Sequence[SplitWeight], dtypes: Sequence[tf.DType]) -> list[tf.Tensor]:
        return self._of_graph().differentiable(weights, dtypes, ())

    def _of_graph(self) -> "GraphGathers":
        replica = self.local_replica()
        # They hold tensors of the graph, so a mapping from graphs, even a weak one, would keep every graph.
        graph = tf.compat.v1.get_default_graph()
        of_graph: dict[Any, GraphGathers] = getattr(graph, _IN_GRAPH, {})
        setattr(graph, _IN_GRAPH, of_graph)
        if (self, replica) not in of_graph:
            of_graph[self, replica] = GraphGathers(self._sharding, replica, self._bucket_bytes, self._has_samples)
        return of_graph[self, replica]


class GraphGathers:
    """What one replica gathers in one graph.

    Attributes:
        calls: The calls of layers so far, in the order of the forward pass.
        last_sums: What this replica got of the sums of the gradients that were exchanged last.
    """

    def __init__(
        self, sharding: StateSharding, local_replica: int, bucket_bytes: int, has_samples: Callable[[], Any]
    ) -> None:
        self.calls: list[LayerCall] = []
        self.last_sums: list[tf.Tensor] = []
        self._sharding, self._local_replica, self._bucket_bytes = sharding, local_replica, bucket_bytes
        self._has_samples = has_samples
        self._replica = sharding.first + local_replica
        self._graph = weakref.ref(tf.compat.v1.get_default_graph())

    @property
    def is_present(self) -> bool:
        """Whether its graph is the one that is being traced."""
        return self._graph() is tf.compat.v1.get_default_graph()

    def differentiable(
        self,
        weights: Sequence[SplitWeight],
        dtypes: Sequence[tf.DType],
        after: Sequence[tf.Tensor],
        on_gradient: Callable[[], None] = lambda: None,
    ) -> list[tf.Tensor]:
        """Returns whole values, gathered when `after` are there. Gradients leave by a reduce-scatter.

        `on_gradient` is called when the operations of backpropagation exist that use the values.
        """
        values = self.gather(weights, dtypes, after)

        @tf.custom_gradient
        def as_function_of_parts(*parts: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., list[tf.Tensor]]]:
            def scatter(*gradients: Any) -> list[tf.Tensor]:
                on_gradient()
                return self._scatter(weights, parts, gradients)

            return [tf.identity(value) for value in values], scatter

        linked = as_function_of_parts(*[weight.part.read_value() for weight in weights])
        return [
            value if weight.trainable else tf.stop_gradient(value)
            for weight, value in zip(weights, linked, strict=True)
        ]

    def gather(
        self, weights: Sequence[SplitWeight], dtypes: Sequence[tf.DType], after: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Returns whole values in the given dtypes. They are requested when the tensors `after` are there."""
        whole: dict[int, tf.Tensor] = {}
        with tf.control_dependencies([tensor for tensor in after if is_symbolic(tensor)]):
            parts = {
                index: tf.cast(weight.part.read_value(), dtype)
                for index, (weight, dtype) in enumerate(zip(weights, dtypes, strict=True))
            }
            exchange, units = self._exchange(weights, dtypes)
            for unit in units:
                own = {index: parts[index] for index in unit.positions if int(parts[index].shape[0])}
                whole |= exchange.all_gather(unit, own, unit.positions, dtypes[unit.positions[0]])
            return [tf.reshape(whole[index], weight.shape) for index, weight in enumerate(weights)]

    def _scatter(
        self, weights: Sequence[SplitWeight], parts: Sequence[tf.Tensor], gradients: Sequence[Any]
    ) -> list[tf.Tensor]:
        dtypes = [part.dtype for part in parts]
        dense = {
            index: tf.cast(tf.convert_to_tensor(gradient), dtype)
            for index, (gradient, dtype) in enumerate(zip(gradients, dtypes, strict=True))
        }
        contributes = self._has_samples()
        contributes = None if contributes is None or contributes is True else tf.convert_to_tensor(contributes)
        exchange, units = self._exchange(weights, dtypes)
        sums: dict[int, tf.Tensor] = {}
        for unit in units:
            of_unit = {index: zeros_unless(contributes, dense[index]) for index in unit.positions}
            sums |= exchange.reduce_scatter(unit, of_unit, None)
        self.last_sums = list(sums.values())
        for of_weight in self.last_sums:
            tf.compat.v1.add_to_collection(PARTS_OF_SUMS, of_weight)
        return [sums[index] if index in sums else tf.zeros_like(part) for index, part in enumerate(parts)]

    def _exchange(
        self, weights: Sequence[SplitWeight], dtypes: Sequence[tf.DType]
    ) -> tuple[PartExchange, Sequence[Unit]]:
        specs = [tf.TensorSpec(weight.shape, dtype) for weight, dtype in zip(weights, dtypes, strict=True)]
        layout = SpanLayout.plan_equal(specs, len(self._sharding.replicas), self._bucket_bytes)
        group = self._sharding.reduction(self._local_replica).gradient_group([])
        return PartExchange(layout, group, self._sharding.replicas, self._replica), layout.units


class LayerCall:
    """One call of a layer in a graph, with its weights gathered before, and again for its backward pass."""

    def __init__(self, gathers: GraphGathers, layer: Any, weights: Sequence[SplitWeight]) -> None:
        self._gathers, self._weights = gathers, list(weights)
        self._dtypes = computed_dtypes(layer, weights)
        self._derived: Derived | None = None  # the weights of the forward pass
        self._inputs: list[tf.Tensor] = []
        self._begin: list[tf.Tensor] = []  # after these the weights of the next layer are gathered
        self._again: list[tf.Tensor] | None = None
        self._writes = self._count_writes()
        self._gradients: Sequence[tf.Tensor] = ()  # of the outputs

    def run(self, call: Callable[..., Any], inputs: Any) -> Any:
        """Calls the layer."""
        gathers = self._gathers
        self._inputs = [leaf for leaf in keras.tree.flatten(inputs) if is_symbolic(leaf)]
        # The weights of a layer are requested when the one before it begins, not at once: that would need all memory.
        before = gathers.calls[-1]._begin if gathers.calls else self._inputs
        values = gathers.differentiable(self._weights, self._dtypes, before, self._move)
        if is_rematerialized():  # backpropagation computes with what the call that it makes has gathered
            with with_gathered(self._weights, values):
                return call(*inputs[0], **inputs[1])
        gathers.calls.append(self)
        args, kwargs = _with_gradients(inputs, lambda gradients: self._move())
        with with_gathered(self._weights, values):
            outputs = call(*args, **kwargs)
        self._derived = Derived(values)
        # A penalty of weights has no inputs: of several of them each waits for the one before it.
        self._begin = self._inputs or [leaf for leaf in keras.tree.flatten(outputs) if is_symbolic(leaf)]
        return _with_gradients(outputs, self._begin_backward)

    def _begin_backward(self, gradients: Sequence[Any]) -> None:
        """Is called with the gradients of the outputs."""
        gathers = self._gathers
        if not gathers.is_present:
            return
        position = gathers.calls.index(self)
        if self._derived is not None:
            # A later layer may use weights of this one: its forward pass cannot wait for gradients.
            self._derived.note_users()
        self._gradients = [gradient for gradient in gradients if is_symbolic(gradient)]
        if not self._inputs:
            self._gradients = [*self._gradients, *gathers.last_sums]
        if position < len(gathers.calls) - 1:  # the last one computes with what it has just gathered
            self._gather_again(self._gradients, position)
        if position:
            gathers.calls[position - 1]._gather_again(self._gradients, position - 1)

    def _gather_again(self, after: Sequence[tf.Tensor], position: int) -> None:
        # Backpropagation rarely needs the weights of the first layer, whose inputs have no gradient; see `_move`.
        if self._again is None and position and self._derived is not None and not self._is_changed:
            self._derived.note_users()
            self._again = self._gathers.gather(self._weights, self._dtypes, after)

    def _count_writes(self) -> int:
        return count_writes([weight.part for weight in self._weights])

    @property
    def _is_changed(self) -> bool:
        """Whether the weights may have changed since the forward pass, so that its values are needed."""
        return self._count_writes() != self._writes

    def _move(self) -> None:
        """Makes what backpropagation has added use the weights that are gathered again."""
        gathers, derived = self._gathers, self._derived
        if derived is None or not gathers.is_present or gathers.calls[-1] is self:
            return
        if self._again is None and derived.has_new_users() and not self._is_changed:
            self._again = gathers.gather(self._weights, self._dtypes, self._gradients)
        if self._again is not None:
            derived.move_new_users(self._again)


def _with_gradients(structure: Any, on_gradients: Callable[[Sequence[Any]], None]) -> Any:
    """Returns a structure of equal tensors; `on_gradients` is called when the gradients of floating ones exist."""
    tensors = {id(leaf): leaf for leaf in keras.tree.flatten(structure) if is_symbolic(leaf) and leaf.dtype.is_floating}
    if not tensors:
        return structure

    @tf.custom_gradient
    def same(*values: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., list[Any]]]:
        def gradients(*of_values: Any) -> list[Any]:
            on_gradients(of_values)
            return list(of_values)

        return [tf.identity(value) for value in values], gradients

    new = dict(zip(tensors, same(*tensors.values()), strict=True))

    def replaced(leaf: Any) -> Any:
        if id(leaf) not in new:
            return leaf
        if (mask := get_mask(leaf)) is not None:
            set_mask(new[id(leaf)], mask)
        return new[id(leaf)]

    return keras.tree.map_structure(replaced, structure)
