"""The comparison of the batches of two workers, both in this process, with a key-value store of its own."""

import contextlib
import gc
import threading

import numpy as np
import pytest
import tensorflow as tf

from tfdist.training import batch_comparison
from tfdist.training.batch_comparison import BatchComparison, DifferentBatchesError, compare, fingerprint, same

pytestmark = pytest.mark.usefixtures("cpus")

LIMIT_SECONDS = 30.0


class Store:
    """The key-value store of a cluster."""

    def __init__(self):
        self.values, self.changed, self.for_all = {}, threading.Condition(), []

    def publish(self, key, value, only_for=None):
        with self.changed:
            if key in self.values:
                raise tf.errors.AlreadyExistsError(None, None, key)
            self.values[key] = value
            self.for_all += [key] * (only_for is None)
            self.changed.notify_all()

    def wait_for(self, key):
        with self.changed:
            assert self.changed.wait_for(lambda: key in self.values, LIMIT_SECONDS), key
            return self.values[key]

    def is_published(self, key, seconds):
        with self.changed:
            return self.changed.wait_for(lambda: key in self.values, seconds)

    def take(self, key):
        self.wait_for(key)
        with self.changed:
            return self.values.pop(key)


@pytest.fixture
def workers(monkeypatch):
    store = Store()
    monkeypatch.setattr(batch_comparison, "key_values", store)
    monkeypatch.setattr(batch_comparison.atexit, "register", lambda function: None)
    monkeypatch.setattr(batch_comparison, "_CLOSE_SECONDS", LIMIT_SECONDS)  # on a busy host threads end late
    both = [BatchComparison(rank, 2, "batches") for rank in range(2)]
    yield both
    assert all(key.startswith("batches/ended/") for key in store.for_all)  # batches are compared by the chief alone
    for each in both:
        each._close()
        assert not any(thread.is_alive() for thread in each._threads)


def pairs(x, y):
    return tf.data.Dataset.from_tensor_slices((np.asarray(x, "float32"), y)).batch(4)


def end(workers):
    """Ends a `fit` of both workers; returns their errors."""
    errors = [None, None]

    def end_one(rank):
        try:
            workers[rank].end(only_new=False)
        except DifferentBatchesError as error:
            errors[rank] = str(error)

    threads = [threading.Thread(target=end_one, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_SECONDS)
    return errors


def as_lists(dataset):
    return [tf.nest.map_structure(lambda leaf: leaf.numpy().tolist(), batch) for batch in dataset]


def draw(workers, datasets, passes=2):
    for worker, dataset in zip(workers, datasets, strict=True):
        shown = worker.shown(dataset)
        with contextlib.suppress(tf.errors.OpError):  # a difference is known before the last batch
            assert [as_lists(shown) for _ in range(passes)] == [as_lists(dataset)] * passes


def test_equal_batches(workers):
    draw(workers, [pairs(np.arange(40), np.arange(40))] * 2)
    assert end(workers) == [None, None]


def test_workers_that_draw_other_samples_all_get_the_error(workers):
    order = np.random.default_rng(0).permutation(40)
    draw(workers, [pairs(np.arange(40), np.arange(40)), pairs(order, order)])
    errors = end(workers)
    assert errors[0] == errors[1]
    assert errors[0].startswith("The workers draw different batches, of which each computes its rows")
    assert "Received: x and y of worker 1 differ from worker 0 in batch 1 of pass 1 over the data." in errors[0]
    with pytest.raises(DifferentBatchesError):
        workers[0].check()
    with pytest.raises(tf.errors.OpError, match="The workers draw different batches"):  # a loop within a function
        list(workers[1].shown(pairs(np.arange(40), np.arange(40))))


def test_a_difference_in_a_later_batch(workers):
    y = np.arange(40)
    other = np.where(y < 28, y, y[::-1])  # batch 8 is compared
    draw(workers, [pairs(y, y), pairs(y, other)], passes=1)
    assert "y of worker 1 differs from worker 0 in batch 8 of pass 1 over the data; equal: x" in end(workers)[1]


def test_threads_end_with_the_strategy(workers):
    """A program may create many strategies, as a search for hyperparameters does."""

    class Strategy:
        pass

    strategies = [Strategy() for _ in workers]
    for comparison, strategy in zip(workers, strategies, strict=True):
        comparison.end_with(strategy)
        comparison.shown(pairs(np.arange(8), np.arange(8)))
    threads = [thread for comparison in workers for thread in comparison._threads]
    assert all(thread.is_alive() for thread in threads)
    del strategy
    strategies.clear()
    for thread in threads:
        thread.join(LIMIT_SECONDS)
    assert not any(thread.is_alive() for thread in threads)


def test_numbers_of_classes_that_differ(workers):
    y = np.arange(40) % 5
    draw(workers, [pairs(np.arange(40), y), pairs(np.arange(40), (y + 2) % 5)])
    assert "y of worker 1 differs" in end(workers)[0]


def test_only_other_inputs_from_python_code_are_a_warning(workers, caplog):
    def changed(number):
        def batches():
            yield np.arange(4.0, dtype="float32") + number, np.arange(4)

        spec = (tf.TensorSpec([4], tf.float32), tf.TensorSpec([4], tf.int64))
        return tf.data.Dataset.from_generator(batches, output_signature=spec)

    draw(workers, [changed(0), changed(1)])
    assert end(workers) == [None, None]
    assert [record.message[:55] for record in caplog.records] == [
        "The workers draw the same labels, but other inputs. Rec"
    ]


def test_only_other_inputs_of_arrays_are_an_error(workers):
    draw(workers, [pairs(np.arange(40), np.arange(40)), pairs(np.arange(40) + 1, np.arange(40))])
    assert "x of worker 1 differs" in end(workers)[0]


def test_a_batch_that_only_one_worker_has_drawn_is_not_compared(workers):
    draw(workers[:1], [pairs(np.arange(40), np.arange(40))])
    workers[1].shown(pairs(np.arange(40), np.arange(40)))
    assert end(workers) == [None, None]


def test_iterators_are_compared_by_the_order_of_their_creation(workers):
    """Whatever the order of their first draws, and whether one is used at all."""
    tf.random.set_seed(0)
    data = [worker.shown(pairs(np.arange(40), np.arange(40)).shuffle(10, seed=1)) for worker in workers]
    iterators = [[iter(dataset) for _ in range(4)] for dataset in data]
    drawn = [[next(iterators[rank][number])[1].numpy().tolist() for number in order] for rank, order in ORDERS.items()]
    assert drawn[0][0] == drawn[1][1] != drawn[0][1]
    assert end(workers) == [None, None]
    assert not workers[0]._waiting or len(workers[0]._waiting) == 1  # the one that only worker 1 has drawn


ORDERS = {0: (0, 1, 3), 1: (1, 0, 2, 3)}


def test_a_difference_that_no_step_has_raised_is_logged_when_the_strategy_is_gone(caplog):
    class Strategy:
        pass

    strategy, comparison = Strategy(), BatchComparison(0, 1, "batches")
    comparison.end_with(strategy)
    comparison._error = "The workers draw different batches"
    del strategy
    gc.collect()
    assert "The workers draw different batches" in caplog.text


def test_a_worker_that_does_not_answer_is_a_warning(workers, caplog, monkeypatch):
    monkeypatch.setattr(batch_comparison, "_ANSWER_SECONDS", 0.01)
    draw(workers[:1], [pairs(np.arange(4), np.arange(4))])
    workers[0].end(only_new=False)
    assert "The batches of the workers were not compared" in caplog.text


@pytest.mark.parametrize(
    ("policy", "is_common"), [("AUTO", True), ("DATA", True), ("OFF", False), ("FILE", False), ("HINT", False)]
)
def test_which_data_is_compared(policy, is_common):
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy[policy]
    data = pairs(np.arange(40), np.arange(40)).with_options(options)
    assert batch_comparison.draws_common_batches(data) == is_common
    assert not batch_comparison.draws_common_batches(data.shard(2, 0))


def test_files_are_not_compared():
    assert not batch_comparison.draws_common_batches(tf.data.TextLineDataset(["one"]).batch(2))


def noisy(x, y):
    return x + tf.random.normal([1]), y


def noisy_in_branch(x, y):
    return tf.cond(tf.random.uniform([]) > 0.5, lambda: x, lambda: -x), y


def noisy_by_python(x, y):
    return tf.numpy_function(lambda a: a, [x], tf.float32), y


@pytest.mark.parametrize("function", [noisy, noisy_in_branch, noisy_by_python])
def test_what_threads_draw_in_any_order_is_left_out(function):
    data = pairs(np.arange(40), np.arange(40))
    in_turn, parallel = data.map(function), data.map(function, num_parallel_calls=2)
    after = parallel.map(lambda x, y: {"sum": x + tf.cast(y, tf.float32), "y": (y, y)}).prefetch(1)
    names = [[name for name, _ in batch_comparison.common_inputs(each)] for each in (in_turn, parallel, after)]
    assert names == [["x", "y"], ["y"], ["y/0", "y/1"]]


@pytest.mark.parametrize(
    "rows",
    [
        np.arange(6).reshape(3, 2),
        np.array([b"one", b"two"], object),
        np.array([True, False]),
        np.array(["a", "b"]),
        np.float32(3),
        np.zeros((0, 3), "float32"),
        np.array([np.nan, np.inf, -np.inf, 1e38, -3e38], "float32"),
        np.array([[1e300, 0.0]]),
        np.array([1 + 2j]),
    ],
)
def test_fingerprints_of_all_types(rows):
    rows = np.asarray(rows)
    assert same(fingerprint(rows), fingerprint(rows.copy()))
    assert compare([{"x": fingerprint(rows)}] * 3) is None
    longer = np.concatenate([rows.reshape(-1), rows.reshape(-1), np.ones(1, rows.dtype)])
    assert not same(fingerprint(rows), fingerprint(longer))


@pytest.mark.parametrize(
    "dtype", [tf.bool, tf.half, tf.bfloat16, tf.double, tf.int8, tf.uint16, tf.int64, tf.complex64]
)
def test_fingerprints_of_tensors(dtype):
    rows = tf.cast(tf.constant([[0, 1], [1, 1], [1, 0]]), dtype)
    one, other = fingerprint(rows.numpy()), fingerprint(rows[::-1].numpy())
    assert one[2] and same(one, fingerprint(rows.numpy())) and not same(one, other)


def test_elements_without_values_are_left_out():
    windows = tf.data.Dataset.range(6).window(2).batch(2)
    nothing = tf.data.Dataset.range(6).map(lambda x: (x, None)).batch(2)
    ragged = tf.data.Dataset.from_tensor_slices(tf.ragged.constant([[1], [2, 3]])).batch(2)
    assert [[name for name, _ in batch_comparison.common_inputs(data)] for data in (windows, nothing, ragged)] == [
        [],
        ["x"],
        ["x", "x"],
    ]
    shown = []
    for data in (nothing, ragged):
        numbers = [number for _, number in batch_comparison.common_inputs(data)]
        drawn = list(batch_comparison.shown_batches(data, numbers, lambda *each: shown.append(each)))
        assert len(drawn) == len(list(data))
    assert [each[1] for each in shown] == [0, 0]


def test_rows_that_fingerprints_tell_apart():
    zeros = np.zeros((2, 3), "int64")
    assert not same(fingerprint(zeros), fingerprint(zeros.T))
    blocks = np.random.default_rng(0).normal(size=(2, 4096)).astype("float32")  # the sums of each block are taken alike
    assert not same(fingerprint(blocks), fingerprint(blocks[::-1]))
    names = np.array([b"one", b"two"], object)
    assert not same(fingerprint(names), fingerprint(names[::-1]))


def test_pixels_may_be_rounded_to_the_next_number():
    pixels = np.random.default_rng(0).integers(0, 255, (8, 1000), "uint8")
    rounded = pixels.copy()
    rounded[3, 500] += 1
    assert same(fingerprint(pixels), fingerprint(rounded))
    assert not same(fingerprint(pixels), fingerprint(pixels[::-1]))


def test_rounding_is_no_difference_and_other_rows_are():
    rng = np.random.default_rng(0)
    for size in (8, 500, 60_000):
        rows = rng.uniform(0, 255, (8, size)).astype("float32")
        rounded = rows * (1 + rng.uniform(-3e-7, 3e-7, rows.shape)).astype("float32")
        assert same(fingerprint(rows), fingerprint(rounded))
        assert not same(fingerprint(rows), fingerprint(rows[rng.permutation(8)[::-1]]))
