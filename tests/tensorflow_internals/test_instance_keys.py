"""InstanceKeys: replicas draw equal keys however each has traced, no two collectives share a key, keys are reused."""

import pytest
import tensorflow as tf

from tfdist.tensorflow_internals.instance_keys import InstanceKeys

pytestmark = pytest.mark.usefixtures("cpus")
A, B = "reduce float32 [4]", "gather int32 [2, 3]"


@pytest.fixture
def token():
    return tf.Variable(0.0)


@pytest.fixture
def replica(token):
    return InstanceKeys("CPU:0", token)


def sites(replica, *signatures):
    """A function that executes collectives of `signatures`; returns their keys."""

    @tf.function
    def execute(data):
        return [replica.next(signature) for signature in signatures], data

    return lambda data=0: [int(key) for key in execute(tf.constant(data))[0]]


def test_sites_of_one_graph_have_different_keys(replica):
    execute = sites(replica, A, B, A, B, A)
    assert [len(set(execute())) for _ in range(3)] == [5] * 3


def test_every_second_execution_has_the_same_keys(replica):
    execute = sites(replica, A, B)
    first, second, third, fourth = (execute() for _ in range(4))
    assert (first, second) == (third, fourth)
    assert not set(first) & set(second)


def test_the_order_within_a_graph_does_not_matter(replica):
    first, second = sites(replica, A, B), sites(replica, B, A)
    executed = [first(), second(), second(), first()]
    assert [sorted(keys) for keys in executed[:2]] == [sorted(keys) for keys in executed[2:]]


def test_a_replica_that_traces_alone_draws_what_the_others_draw(replica, token):
    other = InstanceKeys("CPU:0", token)
    execute, execute_elsewhere = sites(replica, A, B, A), sites(other, A, B, A)
    retraced = [execute_elsewhere(data) for data in ([1], [1, 2], [[1]], 1.0, [1])]
    assert [execute() for _ in range(5)] == retraced


def test_another_shape_never_has_a_key_that_was_used(replica):
    used = {key for execute in [sites(replica, A, B)] for _ in range(2) for key in execute()}
    others = sites(replica, "reduce float32 [5]", "gather int32 [3, 2]", "reduce float16 [4]")
    assert not used & {key for _ in range(2) for key in others()}


def test_what_has_no_known_shape_has_a_new_key_each_time(replica):
    execute = sites(replica, None, A, None)
    keys = [execute() for _ in range(6)]
    once = [key for first, _, last in keys for key in (first, last)]
    assert len(set(once)) == 12
    assert not set(once) & {known for _, known, _ in keys}


def test_iterations_of_a_loop_and_branches_draw_new_keys(replica):
    @tf.function
    def loop(rounds):
        keys = tf.TensorArray(tf.int32, rounds)
        for index in tf.range(rounds):
            key = replica.next(A)
            if index % 2 == 0:
                inner = replica.next(A)
            else:
                replica.next(A)
                inner = -1
            keys = keys.write(index, tf.stack([key, inner]))
        return keys.stack()

    rounds = loop(4).numpy().tolist()
    assert len({outer for outer, _ in rounds}) == 1, "two graphs a round: the same range for each"
    assert all(outer != inner for outer, inner in rounds)
    assert [inner == -1 for _, inner in rounds] == [False, True, False, True]


def test_graph_starts_after_all_earlier_collectives_of_the_replica(replica, token):
    # A collective writes its token. TensorFlow orders reads of the token in a graph after that.
    @tf.function
    def execute():
        return replica.next(A)

    graph = execute.get_concrete_function().graph
    (key,) = [op for op in graph.get_operations() if op.type == "StridedSlice"]
    (read,) = [outer_and_inner[1].name for outer_and_inner in graph.captures if outer_and_inner[0] is token.handle]
    assert read in {tensor.name for op in ancestors(key) for tensor in op.inputs}


def ancestors(op):
    """Returns `op` and all operations that run before it."""
    found, stack = {op.name: op}, [op]
    while stack:
        last = stack.pop()
        for earlier in [*last.control_inputs, *(tensor.op for tensor in last.inputs)]:
            if earlier.name not in found:
                found[earlier.name] = earlier
                stack.append(earlier)
    return list(found.values())


def equalized(replicas):
    tf.function(lambda: InstanceKeys.equalize(replicas), autograph=False)()


def test_equalized_replicas_draw_equal_keys_after_one_has_executed_less(replica, token):
    others = [InstanceKeys("CPU:0", token) for _ in range(2)]
    replicas = [replica, *others]
    steps = [sites(each, A, None) for each in replicas]
    branches = [sites(each, B, A, A) for each in replicas]
    for executed in (steps, steps[:1], branches[:2], steps[1:2], branches, steps[:2]):
        for execute in executed:
            execute()
        equalized(replicas)
        drawn = [[execute() for execute in kind] for kind in (steps, branches, steps)]
        assert all(keys == kind[0] for kind in drawn for keys in kind)


def test_equalizing_equal_replicas_changes_no_key(replica, token):
    replicas = [replica, InstanceKeys("CPU:0", token)]
    steps = [sites(each, A, B) for each in replicas]
    before = [execute() for execute in steps]
    equalized(replicas)
    [execute() for execute in steps]
    assert [execute() for execute in steps] == before
