"""Sums over replicas, and conditions around them, also for the threads of TensorFlow's MirroredStrategy.

The replicas of TensorFlow's MirroredStrategy are threads. They reduce in a merge call, which must be in the graph in
which they started, so not in a branch of a condition. But the merge call may contain a condition, whose branches run
the replicas again, as in Keras' LossScaleOptimizer.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.patches import patch, replace
from tfdist.private_symbols import private
from tfdist.strategy_hooks import of_running_step

_ThreadContext = private(
    "tensorflow.python.distribute.mirrored_run:_MirroredReplicaContext",
    "whether the replicas are threads that trace one graph",
)
_reduces_in_replicas = private(
    "tensorflow.python.distribute.merge_call_interim:strategy_supports_no_merge_call",
    "whether a replica reduces without a merge call",
)

Branch = Callable[[], object]


@patch
def patch_merge_calls() -> None:
    """Restores in each replica, after a merge call, the Python state that the other replicas have changed meanwhile."""
    merge = _ThreadContext._merge_call

    @replace(_ThreadContext, "_merge_call")
    def merge_and_restore(self: Any, *args: Any, **kwargs: Any) -> Any:
        restore = of_running_step(lambda hooks: hooks.keep_state())
        result = merge(self, *args, **kwargs)
        if restore is not None:
            restore()
        return result


def cond_over_replicas(predicate: tf.Tensor, if_true: Branch, if_false: Branch) -> None:
    """Calls one of two functions, which may reduce over the replicas, for its effects. Call this in a replica context.

    The predicate is a bool scalar, equal on all replicas.
    """
    if not needs_merge_call():
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
    if not needs_merge_call():
        return list(context.all_reduce(tf.distribute.ReduceOp.SUM, list(tensors)))

    def add(strategy: tf.distribute.Strategy, *values: Any) -> Any:
        del strategy
        device = tf.distribute.ReductionToOneDevice()
        return device.batch_reduce(tf.distribute.ReduceOp.SUM, [(value, value) for value in values])

    return list(context.merge_call(add, args=tuple(tensors)))


def needs_merge_call() -> bool:
    """Whether this replica is a thread that reduces in merge calls, while a function is traced."""
    is_thread = isinstance(tf.distribute.get_replica_context(), _ThreadContext)
    return is_thread and not tf.executing_eagerly() and not _reduces_in_replicas()


@tf.autograph.experimental.do_not_convert
def _call(branch: Branch) -> None:
    branch()
