"""What a program computes within the scope of a strategy, but outside of `strategy.run`."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.patches import patch, replace
from tfdist.private_symbols import private
from tfdist.strategy_hooks import hooks_of

_DistributedVariable = private(
    "tensorflow.python.distribute.values:DistributedVariable", "has no Python number, and no update of rows"
)


@patch
def patch_statements_in_scope() -> None:
    """Makes statements work outside of the replicas of a strategy whose variables have copies.

    Gradient tapes differentiate with respect to the copy of a variable that is read there, the first one. A
    `TFSMLayer`, whose function chooses the copies by the replica, runs on the replicas.
    """
    gradient, jacobian, call = tf.GradientTape.gradient, tf.GradientTape.jacobian, keras.layers.TFSMLayer.call

    def is_outside() -> bool:
        return (
            tf.distribute.has_strategy()
            and tf.distribute.in_cross_replica_context()
            and hooks_of(tf.distribute.get_strategy()).has_copies
        )

    @replace(tf.GradientTape, "gradient")
    def gradient_of_copies(self: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        return gradient(self, target, _first_copies(sources) if is_outside() else sources, *args, **kwargs)

    @replace(tf.GradientTape, "jacobian")
    def jacobian_of_copies(self: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        return jacobian(self, target, _first_copies(sources) if is_outside() else sources, *args, **kwargs)

    @replace(keras.layers.TFSMLayer, "call")
    def call_on_replicas(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not (tf.executing_eagerly() and is_outside()):
            return call(self, *args, **kwargs)
        strategy = tf.distribute.get_strategy()
        results = strategy.run(functools.partial(call, self, *args, **kwargs))
        return tf.nest.map_structure(lambda result: strategy.experimental_local_results(result)[0], results)

    if not hasattr(_DistributedVariable, "__float__"):
        replace(_DistributedVariable, "__float__")(lambda self: float(self.read_value()))
        replace(_DistributedVariable, "__int__")(lambda self: int(self.read_value()))
        for name in ("scatter_nd_add", "scatter_nd_sub", "scatter_nd_update"):
            replace(_DistributedVariable, name)(_on_copies(name))


def _first_copies(sources: Any) -> Any:
    def first(source: Any) -> Any:
        variable = source.value if isinstance(source, keras.Variable) else source
        is_distributed = isinstance(variable, tf.distribute.DistributedValues)
        return tf.distribute.get_strategy().experimental_local_results(variable)[0] if is_distributed else variable

    return tf.nest.map_structure(first, sources)


def _on_copies(name: str) -> Callable[..., Any]:
    """Returns a method of a distributed variable that calls the method `name` of its copies."""

    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        def update_one(variable: tf.Variable) -> None:
            getattr(variable, name)(*args, **kwargs)

        if not tf.distribute.in_cross_replica_context():  # replicas would change their copies in different ways
            return getattr(tf.Variable, name)(self, *args, **kwargs)
        update_one = tf.autograph.experimental.do_not_convert(update_one)
        self.distribute_strategy.extended.update(self, update_one, group=False)
        return self

    return update


def is_outside_of_replicas(strategy: Any) -> bool:
    """Whether an optimizer of a strategy with several replicas updates outside of them."""
    if strategy.num_replicas_in_sync == 1:
        return False
    return tf.distribute.get_strategy() is not strategy or tf.distribute.in_cross_replica_context()


def apply_on_replicas(
    strategy: Any, apply: Callable[[list[Any]], None], gradients: Sequence[Any], are_values: Sequence[bool]
) -> None:
    """Calls `apply` on each replica with equal parts of the gradients, which add up to them.

    On several workers these are then the mean of the workers' gradients.
    """

    def apply_parts() -> None:  # a tensor for each replica: one for all of them would be reduced to itself
        apply(
            [
                gradient if is_value or gradient is None else _part(gradient, strategy.num_replicas_in_sync)
                for gradient, is_value in zip(gradients, are_values, strict=True)
            ]
        )

    strategy.run(tf.autograph.experimental.do_not_convert(apply_parts))


def _part(gradient: Any, count: int) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values / count, gradient.indices, gradient.dense_shape)
    return gradient / count
