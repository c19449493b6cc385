"""Stateful operations of one replica, such as assertions and Python functions, do not wait for those of another."""

import gc
import time
import weakref

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


def reductions_that_wait_for_another(function):
    """Returns the collectives of a concrete function that run after another one; such a function never ends."""
    reductions = [one for one in function.graph.get_operations() if one.type == "CollectiveReduceV2"]
    assert len(reductions) == 2
    return [one.name for one in reductions if kinds(before(one), "CollectiveReduceV2")]


def check_a_sum():
    drawn = tf.numpy_function(lambda: np.float32(2), [], tf.float32)
    total = tf.distribute.get_replica_context().all_reduce("sum", drawn)
    with tf.control_dependencies([tf.debugging.Assert(total > 1, ["too small"])]):
        return tf.identity(total)


def note(noted, what, late=0.05):
    """Writes, when it runs, the replica and `what` into `noted`; replica 1 is `late` by so many seconds."""

    def write(replica):
        time.sleep(late * replica)
        noted.append((int(replica), what))

    tf.numpy_function(write, [tf.distribute.get_replica_context().replica_id_in_sync_group], [])


def two_replicas_that_check_a_sum():
    """Returns a strategy and a step whose replicas call Python, sum the result, and assert something of the sum."""
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])

    @tf.function
    def step():
        tf.debugging.Assert(tf.numpy_function(lambda: True, [], tf.bool), ["first"])
        return strategy.run(check_a_sum)

    return strategy, step


def test_a_replica_asserts_something_of_a_sum_to_which_the_next_one_contributes_by_python():
    strategy, step = two_replicas_that_check_a_sum()
    assert not reductions_that_wait_for_another(step.get_concrete_function())
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


def test_a_later_run_and_what_follows_come_after_all_replicas():
    strategy, noted = MirroredStrategy(["CPU:0", "CPU:1"]), []

    @tf.function
    def steps():
        for number in range(2):
            strategy.run(lambda number=number: note(noted, number, late=0.1 - 0.1 * number))
        tf.numpy_function(lambda: noted.append("end"), [], [])

    steps()
    assert [one for one in noted if one[0] == 1] == [(1, 0), (1, 1)]
    assert noted[-1] == "end"


def test_replicas_without_such_operations_add_none():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    step = tf.function(lambda: strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("sum", 1.0)))
    assert kinds(step.get_concrete_function().graph.get_operations(), "Assert") == []


def test_a_merge_call_comes_after_all_replicas_and_before_what_they_do_next():
    strategy, noted = MirroredStrategy(["CPU:0", "CPU:1"]), []

    def on_replica():
        note(noted, "before")
        tf.distribute.get_replica_context().merge_call(
            lambda _: tf.numpy_function(lambda: noted.append((2, "merged")), [], [])
        )
        note(noted, "after")
        return check_a_sum()

    step = tf.function(lambda: strategy.run(on_replica))
    assert not reductions_that_wait_for_another(step.get_concrete_function())
    step()
    assert [what for _, what in noted] == ["before", "before", "merged", "after", "after"]


def test_a_loop_over_a_dataset_keeps_the_order_of_the_variables_that_it_uses():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        total = tf.Variable(0.0, synchronization=tf.VariableSynchronization.ON_READ)

    def on_replica():
        tf.numpy_function(lambda: time.sleep(0.05), [], [])
        total.assign(0.0)
        for number in tf.data.Dataset.range(1, 4):
            total.assign_add(tf.cast(number, tf.float32))
        found = tf.identity(total)
        total.assign(100.0)
        return found

    found = tf.function(lambda: strategy.run(on_replica))()
    assert [float(one) for one in strategy.experimental_local_results(found)] == [6.0, 6.0]


def test_a_function_that_is_itself_given_to_run():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])

    @tf.function
    def on_replica(given):
        if given > 0:  # by AutoGraph
            given = 2 * given
        return given + check_a_sum()

    step = tf.function(lambda given: strategy.run(on_replica, (given,)))
    graph = step.get_concrete_function(tf.constant(1.0)).graph
    (called,) = {one.get_attr("f").name for one in graph.get_operations() if one.type == "StatefulPartitionedCall"}
    assert not reductions_that_wait_for_another(graph._get_function(called))
    for run in (step, lambda given: strategy.run(on_replica, (given,))):
        for given, expected in ((1.0, 6.0), (-1.0, 3.0)):
            found = strategy.experimental_local_results(run(tf.constant(given)))
            assert [float(one) for one in found] == [expected] * 2


def test_a_function_that_is_given_to_run_is_traced_once_and_freed():
    strategy, traced = MirroredStrategy(["CPU:0", "CPU:1"]), []

    @tf.function(autograph=False)
    def on_replica():
        traced.append(weakref.ref(tf.compat.v1.get_default_graph()))
        return tf.constant(1.0)

    for _ in range(3):
        strategy.run(on_replica)
    assert len(traced) == 2, "once for each replica"
    del on_replica
    gc.collect()
    assert all(graph() is None for graph in traced)


def test_the_sum_s_error_is_raised():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])

    def on_replica():
        total = tf.distribute.get_replica_context().all_reduce("sum", tf.constant(1.0))
        tf.debugging.Assert(total < 2, ["too large"])
        return total

    with pytest.raises(tf.errors.InvalidArgumentError, match="too large"):
        tf.function(lambda: strategy.run(on_replica))()


def test_a_loop_of_a_replica_in_which_it_sums_is_refused():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])

    def on_replica(start):
        replica = tf.distribute.get_replica_context()
        return tf.while_loop(lambda x: x < 100, lambda x: replica.all_reduce("sum", x), [start])[0]

    with pytest.raises(ValueError, match="in a loop of the graph"):
        # Traced, not called: a call without this error would never end.
        tf.function(lambda: strategy.run(on_replica, (tf.constant(1.0),))).get_concrete_function()

    def in_python(start):
        for _ in range(2):
            start = tf.distribute.get_replica_context().all_reduce("sum", start)
        return start

    @tf.function
    def around():
        total = tf.constant(1.0)
        for _ in tf.range(2):
            total = strategy.experimental_local_results(strategy.run(in_python, (total,)))[0]
        return total

    assert float(around()) == 16.0
