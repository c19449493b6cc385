"""Sums over replicas and conditions around them, wherever TensorFlow's own replicas can make them.

The replicas of TensorFlow's MirroredStrategy are threads. To reduce they meet in a merge call, which has to be made in
the graph that they began in, so not in a branch of a condition. But the place where they meet may hold a condition, in
whose branches they begin anew: Keras' LossScaleOptimizer does the same.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.private_symbols import private

_ThreadContext = private(
    "tensorflow.python.distribute.mirrored_run:_MirroredReplicaContext", "tells whether replicas meet in one graph"
)
_reduces_in_replicas = private(
    "tensorflow.python.distribute.merge_call_interim:strategy_supports_no_merge_call",
    "tells whether a replica reduces by itself",
)

Branch = Callable[[], object]


def cond_over_replicas(predicate: tf.Tensor, if_true: Branch, if_false: Branch) -> None:
    """Calls one of two functions, which may reduce over the replicas; to be called in a replica context.

    Args:
      predicate: a bool scalar, equal on all replicas.
      if_true: called on every replica, for its effects, where the predicate holds.
      if_false: likewise where it does not.
    """
    if not _must_meet():
        tf.cond(predicate, if_true, if_false)
        return

    def choose(strategy: tf.distribute.Strategy, predicates: Any, *branches: Any) -> None:
        on_replicas = [lambda branch=branch: strategy.run(_call, args=(branch,)) for branch in branches]
        tf.cond(strategy.experimental_local_results(predicates)[0], *on_replicas)

    tf.distribute.get_replica_context().merge_call(choose, args=(predicate, if_true, if_false))


def sum_over_replicas(tensors: Sequence[Any]) -> list[Any]:
    """The sums of the replicas' tensors or `tf.IndexedSlices`, within a branch of `cond_over_replicas`, too.

    TensorFlow feeds the numbers of its collectives when a function is called, and a loop within it (Keras'
    `steps_per_execution`) does not pass them on. So replicas that meet add up on the first one's device, and send back.
    """
    context = tf.distribute.get_replica_context()
    if not _must_meet():
        return list(context.all_reduce(tf.distribute.ReduceOp.SUM, list(tensors)))

    def add(strategy: tf.distribute.Strategy, *values: Any) -> Any:
        del strategy
        device = tf.distribute.ReductionToOneDevice()
        return device.batch_reduce(tf.distribute.ReduceOp.SUM, [(value, value) for value in values])

    return list(context.merge_call(add, args=tuple(tensors)))


def _must_meet() -> bool:
    """Whether this replica is a thread that reduces in merge calls, in a function that is being traced."""
    is_thread = isinstance(tf.distribute.get_replica_context(), _ThreadContext)
    return is_thread and not tf.executing_eagerly() and not _reduces_in_replicas()


@tf.autograph.experimental.do_not_convert
def _call(branch: Branch) -> None:
    branch()
