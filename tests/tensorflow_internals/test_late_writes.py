"""What a function writes waits for an operation at its end, except where an earlier resource depends on it."""

import pytest
import tensorflow as tf

from tfdist.tensorflow_internals.late_writes import check_before_writes, write_after
from tfdist.tensorflow_internals.operation_order import leave_unordered

pytestmark = pytest.mark.usefixtures("cpus")


class _Steps:
    """A function that exchanges through a queue, and waits for a queue before it writes.

    Attributes:
        variables: What it writes.
        early: The positions of those to which its last graph writes without waiting.
    """

    def __init__(self, body, *initial):
        self.variables = [tf.Variable(value) for value in initial]
        self._exchanged, self._signal = tf.queue.FIFOQueue(9, [tf.float32]), tf.queue.FIFOQueue(9, [tf.bool])

        def exchange(value):
            with tf.control_dependencies([self._exchanged.enqueue(value)]):
                return self._exchanged.dequeue()

        def add(earlier):
            with tf.control_dependencies(earlier):
                return tf.raw_ops.Assert(condition=self._signal.dequeue(), data=["not now"])

        def traced():
            result = body(exchange, *self.variables)
            handles = [variable.handle for variable in self.variables]
            early = write_after(handles, [self._exchanged.queue_ref], add)
            self.early = [index for index, handle in enumerate(handles) if id(handle) in early]
            return result

        self._function = tf.function(traced)

    @property
    def has_waited(self):
        """Whether the operation before the writes has run."""
        return int(self._signal.size()) == 0

    def traced_early(self):
        """Traces the function; returns `early`."""
        self._function.get_concrete_function()
        return self.early

    def __call__(self, may_write):
        self._signal.enqueue(may_write)
        try:
            return self._function()
        except tf.errors.InvalidArgumentError:
            return None

    @property
    def values(self):
        return [variable.numpy().item() for variable in self.variables]


def test_writes_wait_and_what_an_exchange_uses_does_not():
    def step(exchange, weight, counter, total):
        total.assign_add(exchange(weight * 2.0))
        weight.assign_sub(exchange(weight + total))
        counter.assign_add(1)
        return weight.read_value()

    steps = _Steps(step, 1.0, 0, 0.0)
    assert steps(False) is None
    assert steps.early == [2]
    assert steps.values == [1.0, 0, 2.0]
    assert steps(True).numpy() == 1.0 - (1.0 + 4.0)
    assert steps.values == [-4.0, 1, 4.0]


def test_a_variable_that_is_written_twice_waits_only_if_both_writes_can():
    def step(exchange, first, second):
        first.assign_add(exchange(1.0))
        first.assign_add(exchange(first + 1.0))
        second.assign_add(exchange(1.0))
        second.assign_add(1.0)

    steps = _Steps(step, 0.0, 0.0)
    steps(False)
    assert steps.early == [0]
    assert steps.values == [3.0, 0.0]


def test_order_that_no_input_shows_counts():
    """A read that comes later in the program, and assertions, which run in their order."""

    def step(exchange, read_later, asserted, free):
        read_later.assign_add(1.0)
        asserted.assign_add(1.0)
        free.assign_add(1.0)
        value = read_later.read_value()
        tf.debugging.assert_greater(asserted.read_value(), 0.0)
        tf.print("", end="")
        with tf.control_dependencies([tf.raw_ops.Assert(condition=True, data=["last"])]):
            return exchange(value)

    steps = _Steps(step, 0.0, 0.0, 0.0)
    steps(False)
    assert steps.early == [0, 1]
    assert steps.values == [1.0, 1.0, 0.0]


def test_calls_and_conditions():
    """A condition that only reads a variable does not write to it; one that exchanges and writes cannot wait."""

    @tf.function
    def add_to(variable, value):
        variable.assign_add(value)

    def step(exchange, read, called, conditional, exchanged):
        total = exchange(tf.cond(read > 0.0, lambda: read * 2.0, lambda: read * 3.0))
        add_to(called, total)
        tf.cond(total > 0.0, lambda: conditional.assign_add(total), conditional.read_value)
        tf.cond(read > 0.0, lambda: exchanged.assign_add(exchange(read.read_value())), exchanged.read_value)
        read.assign_add(total)

    steps = _Steps(step, 1.0, 0.0, 0.0, 0.0)
    steps(False)
    assert steps.early == [3]
    assert steps.values == [1.0, 0.0, 0.0, 1.0]
    steps(True)
    assert steps.values == [3.0, 2.0, 2.0, 2.0]


def test_a_check_that_fails_comes_before_what_writes_wait_for():
    """Its result is there at once; whether it is right takes longer to find out."""

    def step(exchange, weight):
        value = exchange(weight + 1.0)
        slow = tf.ones([400, 400])
        for _ in range(20):
            slow = tf.matmul(slow, slow) / 400.0
        with tf.control_dependencies([value]):
            is_right = tf.reduce_sum(slow) < 0.0
        check = tf.raw_ops.Assert(condition=is_right, data=["wrong"])
        leave_unordered(check)
        check_before_writes(check)
        weight.assign_add(value)

    steps = _Steps(step, 0.0)
    assert steps(True) is None
    assert steps.early == [] and steps.values == [0.0]
    assert not steps.has_waited


@pytest.mark.parametrize("where", ["at the top", "in a function", "in a case"])
def test_devices_that_wait_for_each_other(where):
    """The exchange of one device waits for a sum over both, and so for what the other one has written before it."""

    def sum_over_devices(value):
        return tf.raw_ops.CollectiveReduceV2(
            input=value, group_size=1, group_key=71, instance_key=72, ordering_token=[], merge_op="Add", final_op="Id"
        )

    def step(exchange, of_this_device, of_the_other, free):
        summed = exchange(sum_over_devices(of_this_device.read_value()))
        value = of_the_other.assign_add(1.0)
        with tf.device("CPU:1"):
            if where == "in a case":
                branches = [lambda: value, lambda: value + 1.0, lambda: sum_over_devices(value)]
                tf.switch_case(tf.cast(of_the_other.read_value(), tf.int32), branches)
            else:
                (tf.function(sum_over_devices) if where == "in a function" else sum_over_devices)(value)
        free.assign_add(summed)

    assert _Steps(step, 0.0, 0.0, 0.0).traced_early() == [1]
