"""Stateful operations of one replica, such as assertions and Python functions, do not wait for those of another."""

import numpy as np
import pytest
import tensorflow as tf

from tfdist.strategies import MirroredStrategy

pytestmark = pytest.mark.usefixtures("cpus")


def before(operation):
    """Returns all operations that run before this one."""
    found = [operation]
    for one in found:
        found += [other for other in [*(t.op for t in one.inputs), *one.control_inputs] if other not in found]
    return found[1:]


def kinds(operations, kind):
    return [operation.name for operation in operations if operation.type == kind]


def two_replicas_that_check_a_sum():
    """Returns a strategy and a step whose replicas call Python, sum the result, and assert something of the sum."""
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])

    def on_replica():
        drawn = tf.numpy_function(lambda: np.float32(2), [], tf.float32)
        total = tf.distribute.get_replica_context().all_reduce("sum", drawn)
        with tf.control_dependencies([tf.debugging.Assert(total > 1, ["too small"])]):
            return tf.identity(total)

    @tf.function
    def step():
        tf.debugging.Assert(tf.numpy_function(lambda: True, [], tf.bool), ["first"])
        return strategy.run(on_replica)

    return strategy, step


def test_a_replica_asserts_something_of_a_sum_to_which_the_next_one_contributes_by_python():
    strategy, step = two_replicas_that_check_a_sum()
    graph = step.get_concrete_function().graph
    reductions = [operation for operation in graph.get_operations() if operation.type == "CollectiveReduceV2"]
    assert len(reductions) == 2
    for reduction in reductions:  # before the step runs: it would never end
        assert kinds(before(reduction), "CollectiveReduceV2") == []
    assert [float(total) for total in strategy.experimental_local_results(step())] == [4.0, 4.0]


def test_the_operations_of_a_replica_keep_their_order():
    _, step = two_replicas_that_check_a_sum()
    graph = step.get_concrete_function().graph
    python = [operation for operation in graph.get_operations() if operation.type == "PyFunc"]
    assert len(python) == 3
    for replica in python[1:]:
        assert python[0].name in kinds(before(replica), "PyFunc"), "what stood before the replicas runs before them"
    printed = []

    @tf.function
    def prints():
        def on_replica():
            for number in range(3):
                name = tf.distribute.get_replica_context().replica_id_in_sync_group
                tf.numpy_function(lambda replica, number: printed.append((replica, number)), [name, number], [])

        MirroredStrategy(["CPU:0", "CPU:1"]).run(on_replica)

    prints()
    for replica in (0, 1):
        assert [number for of, number in printed if of == replica] == [0, 1, 2]


def test_the_sum_s_error_is_raised():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])

    def on_replica():
        total = tf.distribute.get_replica_context().all_reduce("sum", tf.constant(1.0))
        tf.debugging.Assert(total < 2, ["too large"])
        return total

    with pytest.raises(tf.errors.InvalidArgumentError, match="too large"):
        tf.function(lambda: strategy.run(on_replica))()
