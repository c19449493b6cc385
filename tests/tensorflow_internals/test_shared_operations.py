"""Equal operations of a function are created once where `shared_operations` applies, and what they compute stays."""

import pytest
import tensorflow as tf

from tfdist.tensorflow_internals.shared_operations import shared_operations

pytestmark = pytest.mark.usefixtures("cpus")


def traced(function):
    """A concrete function without arguments, and the number of operations of each type in it."""
    concrete = tf.function(function, autograph=False).get_concrete_function()
    types = [operation.type for operation in concrete.graph.get_operations()]
    return concrete, {kind: types.count(kind) for kind in types}


def test_equal_operations_are_created_once():
    rate, step = tf.Variable(0.5), tf.Variable(3.0)

    @shared_operations()
    def sums():
        return tf.add_n([rate * tf.pow(0.9, step) for _ in range(5)])

    concrete, counts = traced(sums)
    assert (counts["Pow"], counts["Mul"], counts["ReadVariableOp"], counts["Const"]) == (1, 1, 2, 1)
    assert float(concrete()) == pytest.approx(5 * 0.5 * 0.9**3)


def test_a_variable_is_read_again_after_it_was_changed():
    variable = tf.Variable(1.0)
    change = tf.function(lambda: variable.assign_add(10.0))

    @shared_operations()
    def values():
        before = variable + 0.0
        variable.assign_add(1.0)
        after = variable + 0.0
        change()
        after_call = variable + 0.0
        tf.cond(after_call > 0, lambda: variable.assign(100.0), lambda: variable.assign(-100.0))
        return before, after, after_call, variable + 0.0

    concrete, _ = traced(values)
    assert [float(value) for value in concrete()] == [1.0, 2.0, 12.0, 100.0]


def test_a_variable_that_a_merge_call_changed_is_read_again(cpus):
    strategy = tf.distribute.MirroredStrategy(cpus[:2])
    with strategy.scope():
        variable = tf.Variable(1.0, aggregation=tf.VariableAggregation.MEAN)

    @shared_operations()
    def replica():
        before = variable + 0.0
        variable.assign(before * 2.0)  # another thread assigns it
        return before, variable + 0.0

    results = tf.function(lambda: strategy.run(replica), autograph=False)()
    assert [[float(one) for one in strategy.experimental_local_results(result)] for result in results] == [
        [1.0, 1.0],
        [2.0, 2.0],
    ]


def test_what_a_tape_records_is_not_shared():
    def gradient():
        with shared_operations(), tf.GradientTape() as tape:
            x, factor = tf.constant(3.0), tf.constant(3.0)
            tape.watch(x)
            y = x * x * factor
        return tape.gradient(y, x)

    assert float(traced(gradient)[0]()) == 18.0


def test_other_devices_types_and_names_are_not_shared(cpus):
    @shared_operations()
    def constants():
        names = [tf.constant(2.0, name=name) for name in ("Shape", "Const", "Shape")]
        for device in cpus[:2]:
            with tf.device(device):
                names.append(tf.constant(2.0))
        return [*names, tf.constant(2), tf.constant([2.0])]

    _, counts = traced(constants)
    assert counts["Const"] == 6


def test_constants_do_not_wait():
    def constant():
        with tf.control_dependencies([tf.timestamp()]), shared_operations():
            return tf.constant(1.0)

    concrete, _ = traced(constant)
    (created,) = [one for one in concrete.graph.get_operations() if one.type == "Const"]
    assert not created.control_inputs
