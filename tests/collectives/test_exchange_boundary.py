"""Tensors that leave a graph for the exchange and return: dtypes, functions, conditions, loops, order and errors."""

import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

sys.path.append(str(Path(__file__).parents[1] / "exchange"))
from worker_groups import joined, on_workers

from tfdist.collectives.exchange_boundary import _KINDS, ExchangeBoundary, _to_bytes
from tfdist.tensorflow_internals.late_writes import write_after
from tfdist.tensorflow_internals.workers_launcher import WorkersLauncher

DTYPES = [
    *(tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.dtypes.experimental.float8_e4m3fn, tf.bool, tf.complex64),
    *(tf.int8, tf.uint8, tf.int16, tf.uint32, tf.int32, tf.int64),
]


@pytest.fixture(scope="module")
def boundaries(cpus):
    with joined(2) as exchanges:
        yield [ExchangeBoundary(exchange) for exchange in exchanges]


def of_workers(boundaries, body):
    results = on_workers(2, lambda rank: body(boundaries[rank], rank))
    errors = [result for result in results if isinstance(result, Exception)]
    if errors:
        raise errors[0]
    return results


def cast(values, dtype):
    return tf.cast(tf.constant(values, tf.float32), dtype)  # from float32 to each dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_every_dtype_and_shape_is_sent_as_it_is(boundaries, dtype):
    for shape in ([], [0], [3], [2, 5], [70_000]):
        values = np.arange(np.prod(shape, dtype=int)).reshape(shape) % 2

        def body(boundary, rank, values=values):
            own = cast(values + rank, dtype)
            return boundary.broadcast(own), boundary.all_gather(own[tf.newaxis])

        expected = cast(values, dtype)
        other = cast(values + 1, dtype)
        for sent, gathered in of_workers(boundaries, body):
            assert sent.dtype == dtype and sent.shape == shape
            assert sent.numpy().tobytes() == expected.numpy().tobytes()
            assert gathered.numpy().tobytes() == expected.numpy().tobytes() + other.numpy().tobytes()


def test_what_waits_for_exchanges_waits_for_their_checks(boundaries):
    waits = []

    def add(earlier):
        waits.append([operation.type for operation in earlier])
        return tf.no_op()

    def traced():
        boundaries[0].all_reduce(tf.zeros([2]))
        boundaries[0].broadcast(tf.zeros([70_000], tf.uint8))
        write_after([], boundaries[0].handles(), add)

    tf.function(traced, autograph=False).get_concrete_function()
    assert sorted(waits[0]) == ["Assert"] * 2 + ["QueueDequeueV2"] * 2


def test_bits_of_a_shorter_dtype(boundaries):
    def body(boundary, rank):
        @tf.function
        def gather(halves):  # TensorFlow makes one cast, to bytes and back, of these and those of the boundary
            return tf.bitcast(boundary.all_gather(tf.bitcast(halves, tf.int32)), tf.bfloat16)

        return gather(tf.reshape(cast(np.arange(12) + rank, tf.bfloat16), [1, 6, 2]))

    expected = b"".join(cast(np.arange(12) + rank, tf.bfloat16).numpy().tobytes() for rank in range(2))
    for gathered in of_workers(boundaries, body):
        assert gathered.shape == [2, 6, 2] and gathered.numpy().tobytes() == expected


def test_rows(boundaries):
    rows = [np.arange(6, dtype=np.float32).reshape(2, 3) + 10 * rank for rank in range(2)]

    def body(boundary, rank):
        return boundary.all_to_all(tf.constant(rows[rank])), boundary.reduce_scatter(tf.constant(rows[rank]))

    for rank, (received, total) in enumerate(of_workers(boundaries, body)):
        np.testing.assert_array_equal(received, [rows[0][rank], rows[1][rank]])
        np.testing.assert_array_equal(total, rows[0][rank] + rows[1][rank])


def test_functions_conditions_and_loops(boundaries):
    def body(boundary, rank):
        @tf.function
        def summed(values, times):
            for _ in tf.range(times):
                if values[0] < 100.0:
                    values = boundary.all_reduce(values)
            return values

        return [summed(tf.fill([3], float(rank + 1)), times).numpy().tolist() for times in (0, 1, 3, 20)]

    first, second = of_workers(boundaries, body)
    assert first == [[1.0] * 3, [3.0] * 3, [12.0] * 3, [192.0] * 3]
    assert second[1:] == first[1:]


def test_exchanges_of_a_function_have_one_order_whatever_is_ready_first(boundaries):
    """Worker 1 computes the first of two tensors last. Each has the sum of its own."""

    def body(boundary, rank):
        @tf.function
        def both(slow, quick):
            for _ in range(30 * rank):
                slow = tf.linalg.matmul(slow, tf.eye(64))
            return boundary.all_reduce(slow)[0, 0], boundary.all_reduce(quick)[0]

        return [[float(one) for one in both(tf.fill([64, 64], 1.0), tf.fill([4], 10.0))] for _ in range(20)]

    assert of_workers(boundaries, body) == [[[2.0, 20.0]] * 20] * 2


def test_assertions_do_not_wait_for_an_exchange_before_them(boundaries):
    """Those of another replica of this worker would, to whose sum of gradients this exchange contributes."""

    @tf.function
    def step(tensor):
        total = boundaries[0].all_reduce(tensor)
        with tf.control_dependencies([tf.raw_ops.Assert(condition=tensor[0] > 0, data=["negative"])]):
            return total, tf.identity(tensor)

    graph = step.get_concrete_function(tf.TensorSpec([2])).graph
    *_, assertion = (operation for operation in graph.get_operations() if operation.type == "Assert")
    assert b"negative" in [tensor.op.get_attr("value").string_val[0] for tensor in assertion.inputs[1:]]
    found = [assertion]
    for operation in found:
        inputs = [*(tensor.op for tensor in operation.inputs), *operation.control_inputs]
        found += [other for other in inputs if other not in found]
    assert not any(operation.type == "QueueDequeueV2" for operation in found)


def test_large_and_small_tensors_use_different_channels(boundaries):
    """A small sum passes while a large one waits for the other worker."""

    def body(boundary, rank):
        small = boundary.all_reduce(tf.constant(1.0))
        large = boundary.all_reduce(tf.ones([100_000]))
        return float(small), float(large[0])

    assert of_workers(boundaries, body) == [(2.0, 2.0)] * 2
    assert set(boundaries[0]._lanes) >= {"small", "steps"}


def test_threads_of_the_user_hold_the_interpreter_for_a_short_time(boundaries):
    """Else each step of an exchange waits for 5 ms beside a thread that computes in Python."""
    before = sys.getswitchinterval()
    try:
        for seconds, expected in ((5e-3, 1e-4), (1e-5, 1e-5)):  # what a user has made shorter stays
            sys.setswitchinterval(seconds)
            ExchangeBoundary(boundaries[0].exchange)
            assert sys.getswitchinterval() == pytest.approx(expected)
    finally:
        sys.setswitchinterval(before)


def test_a_failure_is_an_error_of_the_step_on_each_worker():
    with joined(2) as exchanges:
        boundaries = [ExchangeBoundary(exchange) for exchange in exchanges]

        def body(boundary, rank):
            return tf.function(lambda: boundary.all_reduce(tf.ones([3 + rank])))()

        errors = on_workers(2, lambda rank: body(boundaries[rank], rank))
        for error in errors:  # not the end of the data, for which `fit` would take an OutOfRangeError
            assert isinstance(error, tf.errors.InvalidArgumentError)
            assert "(Shape mismatch)" in str(error)
        assert [str(exchange.failure) for exchange in exchanges] == [str(exchanges[0].failure)] * 2


def test_a_graph_of_tensorflow_1_is_rejected(boundaries):
    with tf.Graph().as_default(), pytest.raises(ValueError, match="need eager execution"):
        boundaries[0].all_reduce(tf.constant(1.0))


def test_a_result_that_a_failed_step_has_left_is_not_taken_for_another():
    """A step that ends between its request and the result would shift all later results by one."""
    with joined(2) as exchanges:
        boundaries = [ExchangeBoundary(exchange) for exchange in exchanges]

        def body(boundary, rank):
            assert float(boundary.all_reduce(tf.constant(1.0))) == 2.0
            lane = boundary._lanes["small"]
            lane._requested.assign_add(1)  # what such a step has done
            lane._requests.enqueue([len(_KINDS) * tf.float32.as_datatype_enum, 2, _to_bytes(tf.constant(5.0))])
            return boundary.all_reduce(tf.constant(1.0))

        for error in on_workers(2, lambda rank: body(boundaries[rank], rank)):
            assert isinstance(error, tf.errors.InvalidArgumentError)
            assert "The exchanges of this worker are out of step" in str(error)


def test_workers_that_wait_on_different_channels_get_an_error_with_both_exchanges():
    """Their programs differ, or one knows a size that the other does not: each would wait for the other."""
    with joined(2) as exchanges:
        boundaries = [ExchangeBoundary(exchange) for exchange in exchanges]

        def body(boundary, rank):
            assert float(boundary.all_reduce(tf.constant(1.0))) == 2.0
            return boundary.all_reduce(tf.ones([100_000]), shape_is_fixed=rank == 0)

        for error in on_workers(2, lambda rank: body(boundaries[rank], rank)):
            assert isinstance(error, tf.errors.InvalidArgumentError)
            calls = [f"worker {rank}: all-reduce 2 of 100000 float32 values" for rank in range(2)]
            assert f"Received: {calls[0]}, steps; {calls[1]}, small." in str(error)


def test_an_exchange_in_another_place_of_the_order_is_not_taken_for_that_of_the_other_worker():
    with joined(2) as exchanges:
        boundaries = [ExchangeBoundary(exchange) for exchange in exchanges]

        def body(boundary, rank):
            if rank == 0:  # also makes the numbers of the exchanges on the other channel differ
                tf.function(lambda: (boundary.all_reduce(tf.ones([])), boundary.all_reduce(tf.ones([100_000]))))()
            return boundary.all_reduce(tf.ones([100_000]))

        for error in on_workers(2, lambda rank: body(boundaries[rank], rank)):
            assert "The workers call different exchanges" in str(error)


def test_an_exchange_that_takes_longer_than_its_limit_names_the_workers_it_waits_for():
    """Worker 1 calls only when it has learned of the failure: values of all workers would make a sum."""
    with joined(3) as exchanges:
        boundaries = [ExchangeBoundary(exchange) for exchange in exchanges]
        in_time = threading.Barrier(2)

        def body(boundary, rank):
            for _ in range(2):
                boundary.all_reduce(tf.ones([5]), limit_seconds=60.0)
            if rank == 1:
                boundary.exchange.wait_for_failure()
            else:
                in_time.wait(30)
            boundary.all_reduce(tf.ones([5]), limit_seconds=5.0)  # in which each of the two sends its values

        for error in on_workers(3, lambda rank: body(boundaries[rank], rank)):
            assert "Received: all-reduce 3 of 5 float32 values, which waits for worker 1 for more than 5 s" in str(
                error
            )


def test_exchanges_in_the_background_fail_while_another_one_is_expected():
    """Worker 0 begins with sequence 1, for which worker 1 has no request when the group fails."""
    with joined(2) as exchanges:
        boundaries = [ExchangeBoundary(exchange) for exchange in exchanges]

        def body(boundary, rank):
            first, second = boundary.new_background(), boundary.new_background()
            for number in (first, second):
                boundary.all_reduce(tf.ones([2]), in_background=number)
            if rank == 0:
                threading.Timer(0.5, boundary.exchange.fail, ["a test"]).start()
            return boundary.all_reduce(tf.ones([2]), in_background=second if rank == 0 else first)

        for error in on_workers(2, lambda rank: body(boundaries[rank], rank)):
            assert "Worker 0 is lost. Received: a test" in str(error)


def test_text_is_an_error_that_does_not_end_the_exchange(boundaries):
    for boundary in boundaries:
        with pytest.raises(ValueError, match="Received: a tensor of strings"):
            boundary.all_gather(tf.constant(["id"]))
    assert [float(total) for total in of_workers(boundaries, lambda boundary, _: boundary.all_reduce(tf.ones([])))] == [
        2,
        2,
    ]


def test_sequences_in_the_background_end_with_their_launchers():
    """A program may create many strategies with exchanges in the background."""

    class Keys:
        pass

    before = set(threading.enumerate())  # of other tests
    with joined(2) as exchanges:
        boundaries = [ExchangeBoundary(exchange) for exchange in exchanges]

        def body(boundary):
            number = boundary.new_background()
            launcher = WorkersLauncher(
                boundary, Keys(), "CPU:0", tf.distribute.experimental.CommunicationOptions(), number
            )
            boundary.end_background_with(launcher, number)
            return float(launcher.sum(tf.constant(2.0)))

        counts = []
        for _ in range(5):
            results = on_workers(2, lambda rank: body(boundaries[rank]))
            assert results == [4.0, 4.0], [str(result) for result in results]
            counts.append(sum(thread.name == "tfdist background" for thread in set(threading.enumerate()) - before))
            assert all(len(boundary._background._lanes) <= 2 for boundary in boundaries)
        end = time.monotonic() + 30
        while sum(thread.name == "tfdist background" for thread in set(threading.enumerate()) - before) > counts[0] + 1:
            assert time.monotonic() < end, counts
            time.sleep(0.01)


def test_a_sequence_that_has_ended_on_another_worker_is_an_error():
    with joined(2) as exchanges:
        boundaries = [ExchangeBoundary(exchange) for exchange in exchanges]
        numbers = [boundary.new_background() for boundary in boundaries]

        def total(rank):
            return float(boundaries[rank].all_reduce(tf.ones([]), in_background=numbers[rank]))

        assert on_workers(2, total) == [2.0, 2.0]
        boundaries[1]._background.remove(numbers[1])
        [error] = on_workers(1, total)
        assert "it has no strategy any more" in str(error)


def test_the_limit_is_that_of_the_communication_options():
    class Boundary:
        size, limits, run_alone = 2, [], None

        def all_reduce(self, tensor, *, limit_seconds, **options):
            self.limits.append(limit_seconds)
            return tensor

    def options(seconds=None):
        return tf.distribute.experimental.CommunicationOptions(timeout_seconds=seconds)

    for of_strategy, of_call in ((None, None), (5.0, None), (5.0, 1.0)):
        launcher = WorkersLauncher(Boundary(), None, "CPU:0", options(of_strategy))
        launcher.sum(tf.ones([2]), options(of_call))
        launcher.all_reduce(tf.ones([2]), options=options(of_call))
    assert Boundary.limits == [None, None, 5.0, 5.0, 1.0, 1.0]
