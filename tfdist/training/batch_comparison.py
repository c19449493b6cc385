"""Compares fingerprints of the batches that workers draw, in the background. Each worker computes rows of them.

Where Python code draws the batches, nothing but its random numbers, files and clocks makes them equal. If they are not,
samples are seen twice or never, and labels may contradict each other, without an error in any step. So a pipeline shows
some of its batches (`shown_batches`), each worker sends their fingerprints to the chief through the key-value
store of the cluster, and the chief reports a difference to all workers, whose main threads raise it.
"""

import atexit
import collections
import contextlib
import functools
import itertools
import json
import logging
import queue
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.collectives.key_values import key_values
from tfdist.tensorflow_internals.input_pipeline import (
    calls_shard,
    is_per_worker,
    is_unordered,
    random_parts,
    runs_python,
)
from tfdist.tensorflow_internals.runtime import global_seed_for_functions

Fingerprint = list[Any]  # of one input: shape, hash or projections, whether its rows differ
Fingerprints = dict[str, Fingerprint]
Show = Callable[[int, int, list[np.ndarray]], None]

_log = logging.getLogger("tfdist")
_BLOCK = 4096
_PROJECTIONS = 4
# CPUs with other instructions round differently: by 1e-7 of each value. Other samples differ by 1e-3 of their sum.
_TOLERANCE = 1e-5
_SHOWN_WORKERS = 8
_ANSWER_SECONDS = 60.0
_CLOSE_SECONDS = 0.5  # some milliseconds are enough, unless the store is lost
_MOST_WAITING = 1000  # batches that some workers have drawn, and others not
# The first batch of a pass, and those whose numbers, from 1, are powers of 8. Batches are numbered from 0.
_SHOWN = [8**exponent - 1 for exponent in range(21)]
_ROWS_AT_LEAST = 4
_VALUES = 1 << 16  # of an input, to look at
_ENDLESS = 1 << 62
_Policy = tf.data.experimental.AutoShardPolicy

_CAUSES = (
    "Likely causes: a generator without a seed (`np.random.default_rng()`, `random.Random()`), files or lists of files "
    "that differ between hosts (sort `os.listdir` and `glob`), a clock, `tf.random.set_seed` with a number of the "
    "worker{unordered}, or the order of a set of strings (use `sorted(set(labels))`, or the same PYTHONHASHSEED on all "
    "workers). Give all workers the same seed: `tfdist run` starts the global generators of Python and NumPy from one. "
    "If each worker is to have separate data, say so: `distribute_datasets_from_function`, or `AutoShardPolicy.OFF` "
    "in the options of a tf.data.Dataset"
)


def fingerprint(rows: np.ndarray) -> Fingerprint:
    """Returns the fingerprint of an input's rows: projections of floating-point numbers and pixels, a hash of others.

    >>> values = np.arange(6, dtype="float32").reshape(3, 2)
    >>> same(fingerprint(values), fingerprint(values * (1 + 1e-7)))
    True
    >>> same(fingerprint(values), fingerprint(values[::-1]))
    False
    """
    varies = bool(len(rows) > 1 and np.any(rows != rows[:1])) if rows.ndim else False
    is_pixel = rows.dtype.kind in "ui" and rows.dtype.itemsize <= 2  # maybe rounded from floating-point numbers
    if rows.dtype.kind != "f" and rows.dtype.name != "bfloat16" and not is_pixel:
        content = repr(rows.tolist()).encode() if rows.dtype.kind == "O" else np.ascontiguousarray(rows).tobytes()
        return [list(rows.shape), zlib.crc32(content), varies]
    values = np.nan_to_num(rows.astype(np.float64), posinf=0.0, neginf=0.0).reshape(-1)
    largest = float(np.abs(values).max(initial=0.0)) or 1.0
    values = (values / largest).astype(np.float32)  # so that no sum overflows
    blocks = np.zeros((-(-values.size // _BLOCK), _BLOCK), np.float32)
    blocks.reshape(-1)[: values.size] = values
    # Each block has another factor, so that blocks in another order have other sums.
    projected = (blocks @ _directions()).astype(np.float64) * np.cos(np.arange(len(blocks)))[:, None]
    sums = np.array([np.abs(values).sum(dtype=np.float64), *projected.sum(axis=0)]) * largest
    return [list(rows.shape), sums.tolist(), varies]


@functools.cache
def _directions() -> np.ndarray:
    return np.random.Generator(np.random.PCG64(0)).standard_normal((_BLOCK, _PROJECTIONS), np.float32)


def same(one: Fingerprint, other: Fingerprint) -> bool:
    """Whether two fingerprints are those of the same rows."""
    if one[0] != other[0] or isinstance(one[1], list) != isinstance(other[1], list):
        return False
    if not isinstance(one[1], list):
        return bool(one[1] == other[1])
    limit = _TOLERANCE * max(one[1][0], other[1][0])
    return all(abs(a - b) <= limit for a, b in zip(one[1], other[1], strict=True))


@dataclass(frozen=True)
class Difference:
    """How workers have drawn different batches.

    Attributes:
        inputs: The inputs that differ, such as "y".
        equal: The inputs that do not differ.
        workers: The workers that differ from worker 0.
        shows_same_order: Whether labels are equal that would differ if the samples, or their order, were different.
    """

    inputs: tuple[str, ...]
    equal: tuple[str, ...]
    workers: tuple[int, ...]
    shows_same_order: bool


def compare(prints: Sequence[Fingerprints]) -> Difference | None:
    """Returns how the batches of workers differ, by rank; None if they do not.

    >>> one, other = ({"x": fingerprint(np.arange(4.0) + n), "y": fingerprint(np.arange(4))} for n in range(2))
    >>> compare([one, other])
    Difference(inputs=('x',), equal=('y',), workers=(1,), shows_same_order=True)
    """
    first = prints[0]
    names = list(dict.fromkeys(name for fingerprints in prints for name in fingerprints))

    def agrees(name: str, worker_prints: Fingerprints) -> bool:
        return name in first and name in worker_prints and same(first[name], worker_prints[name])

    differing = tuple(name for name in names if not all(agrees(name, worker_prints) for worker_prints in prints))
    if not differing:
        return None
    equal = tuple(name for name in names if name not in differing)
    workers = tuple(
        rank for rank, worker_prints in enumerate(prints) if not all(agrees(name, worker_prints) for name in differing)
    )
    only_x = all(name.partition("/")[0] == "x" for name in differing)
    labels = [first[name] for name in equal if name.partition("/")[0] == "y"]
    return Difference(differing, equal, workers, only_x and any(label[2] for label in labels))


def describe(difference: Difference, where: Mapping[str, Any]) -> str:
    """Returns what was received, for a message; `where` is the `batch` and the `pass`, from 0."""
    shown = ", ".join(map(str, difference.workers[:_SHOWN_WORKERS]))
    more = "" if len(difference.workers) <= _SHOWN_WORKERS else f" and {len(difference.workers) - _SHOWN_WORKERS} more"
    workers = f"worker {shown}" if len(difference.workers) == 1 else f"workers {shown}{more}"
    differ = " and ".join(difference.inputs)
    equal = f"; equal: {', '.join(difference.equal)}" if difference.equal else ""
    return (
        f"{differ} of {workers} {'differ' if len(difference.inputs) > 1 else 'differs'} from worker 0 in batch "
        f"{where['batch'] + 1} of pass {where['pass'] + 1} over the data{equal}"
    )


class DifferentBatchesError(ValueError):
    """The workers have drawn different batches, of which each was to compute its rows."""


class BatchComparison:
    """The comparison of the batches of one strategy's datasets."""

    def __init__(self, rank: int, num_workers: int, name: str) -> None:
        """Compares them on at least 2 workers; `name` begins its keys in the key-value store of the cluster."""
        self._rank, self._num_workers, self._name = rank, num_workers, name
        self._datasets: collections.Counter[str] = collections.Counter()
        self._sent: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._waiting: collections.OrderedDict[str, dict[int, dict[str, Any]]] = collections.OrderedDict()
        self._lock = threading.Lock()
        self._error = ""
        self._has_raised = self._has_warned = False
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []
        self._received: dict[int, int] = {}  # on the chief, by worker: how many records
        self._ends = 0
        self._has_new_dataset = False

    def end_with(self, strategy: Any) -> None:
        """Ends the threads when the strategy is not referred to any more."""
        weakref.finalize(strategy, self._end).atexit = False

    def shown(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Returns a dataset with the same batches, which are compared. All workers call this in the same order."""
        if not tf.executing_eagerly():
            return dataset
        inputs = common_inputs(dataset)
        if not inputs:
            return dataset
        names = [name for name, _ in inputs]
        kind = f"{zlib.crc32(repr(dataset.element_spec).encode()):08x}"
        dataset_name = f"{kind}-{self._datasets[kind]}"
        self._datasets[kind] += 1
        self._has_new_dataset = True
        traits = {"dataset": dataset_name, "python": runs_python(dataset), "unordered": is_unordered(dataset)}
        itself, passes = weakref.ref(self), itertools.count()
        number = 0

        def show(name: int, batch: int, rows: list[np.ndarray]) -> None:
            nonlocal number  # A message names the pass that began last.
            number = number if batch else next(passes)
            if (comparison := itself()) is not None:
                prints: Fingerprints = {}
                for part, input_rows in zip(names, rows, strict=True):
                    prints[part if part not in prints else f"{part}, part {len(prints)}"] = fingerprint(input_rows)
                comparison._add({**traits, "name": name, "pass": number, "batch": batch, "prints": prints})

        self._start()
        return shown_batches(dataset, [number for _, number in inputs], show)

    def check(self) -> None:
        """Raises the difference that was found, if any.

        Raises:
            DifferentBatchesError: The workers have drawn different batches.
        """
        if self._error:
            self._has_raised = True
            raise DifferentBatchesError(self._error) from None

    def end(self, *, only_new: bool) -> None:
        """Waits until the batches drawn so far have been compared. All workers call this at the same place.

        With `only_new` it does so only if a dataset was distributed since the last call.

        Raises:
            DifferentBatchesError: The workers have drawn different batches.
        """
        if not self._threads or (only_new and not self._has_new_dataset):
            self.check()
            return
        self._has_new_dataset = False
        number, self._ends = self._ends, self._ends + 1
        self._sent.put({"end": number})
        key = f"{self._name}/ended/{number}"
        with contextlib.suppress(tf.errors.OpError):  # a worker is lost, and the next exchange says so
            if key_values.is_published(key, _ANSWER_SECONDS):
                error = key_values.wait_for(key)
                self._error = self._error or error
            else:
                _log.warning(
                    "The batches of the workers were not compared: not all workers have sent theirs within "
                    f"{_ANSWER_SECONDS:g} s."
                )
        self.check()

    def _start(self) -> None:
        if self._threads:
            return
        targets: list[Any] = [(self._send,), (self._wait_for_difference,)]
        if self._rank == 0:
            self._received = dict.fromkeys(range(1, self._num_workers), 0)
            targets += [(self._receive, rank) for rank in self._received]
        for target, *arguments in targets:
            thread = threading.Thread(target=target, args=arguments, daemon=True, name="tfdist compares batches")
            self._threads.append(thread)
            thread.start()
        atexit.register(self._close)

    def _add(self, record: dict[str, Any]) -> None:
        self.check()  # in a loop within a function, this ends it
        self._sent.put(record)

    def _send(self) -> None:
        with contextlib.suppress(tf.errors.OpError):
            count = 0
            while (record := self._sent.get()) is not None:
                if self._rank == 0:
                    self._take(0, record)
                else:
                    key_values.publish(f"{self._name}/sent/{self._rank}/{count}", json.dumps(record), only_for=0)
                count += 1
        self._closed.wait()
        keys = [f"{self._name}/different/{self._rank}"]
        keys += [f"{self._name}/sent/{rank}/{count}" for rank, count in self._received.items()]
        for key in keys:  # for which the other threads wait
            with contextlib.suppress(tf.errors.OpError):
                key_values.publish(key, "", only_for=self._rank)

    def _receive(self, rank: int) -> None:
        with contextlib.suppress(tf.errors.OpError):
            while not self._closed.is_set():
                key = f"{self._name}/sent/{rank}/{self._received[rank]}"
                text = key_values.take(key)
                if self._closed.is_set():
                    return
                self._received[rank] += 1
                self._take(rank, json.loads(text))

    def _wait_for_difference(self) -> None:
        with contextlib.suppress(tf.errors.OpError):
            error = key_values.wait_for(f"{self._name}/different/{self._rank}")
            self._error = self._error or error

    def _take(self, rank: int, record: dict[str, Any]) -> None:
        key = json.dumps([record.get(part) for part in ("end", "dataset", "name", "batch")])
        with self._lock:
            records = self._waiting.setdefault(key, {})
            records[rank] = record
            if len(records) < self._num_workers:
                while len(self._waiting) > _MOST_WAITING:
                    self._waiting.popitem(last=False)
                return
            del self._waiting[key]
            if "end" in record:
                key_values.publish(f"{self._name}/ended/{record['end']}", self._error)
                return
            prints: list[Fingerprints] = [records[worker]["prints"] for worker in range(self._num_workers)]
            difference = compare(prints)
            if difference is not None and not self._error:
                self._report(difference, record)

    def _report(self, difference: Difference, record: dict[str, Any]) -> None:
        received = describe(difference, record)
        if difference.shows_same_order and record["python"]:
            if not self._has_warned:
                self._has_warned = True
                _log.warning(
                    f"The workers draw the same labels, but other inputs. Received: {received}. Expected: the same, "
                    "unless each worker changes its samples at random. If so, each sample is seen once, with the "
                    "change of the worker that computes it. If not, see docs/errors.md."
                )
            return
        unordered = ", `deterministic=False` in this pipeline" if record["unordered"] else ""
        self._error = (
            "The workers draw different batches, of which each computes its rows: samples are seen twice or "
            f"never. Received: {received}. Expected: the same batches on all workers. "
            f"{_CAUSES.format(unordered=unordered)}."
        )
        for worker in range(self._num_workers):
            key_values.publish(f"{self._name}/different/{worker}", self._error, only_for=worker)

    def _close(self) -> None:
        """Ends the threads that wait in TensorFlow, which must not return while Python exits."""
        self._end()
        deadline = time.monotonic() + _CLOSE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _end(self) -> None:
        if self._error and not self._has_raised:
            _log.error(self._error)
        # The thread that sends ends the others: the process of the chief, which holds the store, may be gone, and then
        # nothing returns.
        atexit.unregister(self._close)
        self._closed.set()
        self._sent.put(None)


def draws_common_batches(dataset: tf.data.Dataset) -> bool:
    """Whether all workers draw the same batches of a dataset that is distributed, of which each takes its rows."""
    policy = dataset.options().experimental_distribute.auto_shard_policy
    return policy in (_Policy.AUTO, _Policy.DATA) and not calls_shard(dataset) and not is_per_worker(dataset)


def common_inputs(dataset: tf.data.Dataset) -> list[tuple[str, int]]:
    """Returns the parts of a batch that all workers draw alike: names, and numbers in the flattened batch.

    Parts that depend on random numbers which threads draw in any order are left out: they differ between workers that
    draw the same samples.

    >>> pairs = tf.data.Dataset.from_tensor_slices(([[1.0], [2.0]], [0, 1])).batch(2)
    >>> def noisy(x, y):
    ...     return x + tf.random.normal([1]), y
    >>> common_inputs(pairs.map(noisy)), common_inputs(pairs.map(noisy, num_parallel_calls=2).prefetch(1))
    ([('x', 0), ('y', 1)], [('y', 1)])
    """
    found, number = [], 0
    is_random = random_parts(dataset)
    is_triple = isinstance(dataset.element_spec, tuple) and len(dataset.element_spec) in (2, 3)
    for leaf, (path, spec) in enumerate(keras.tree.flatten_with_path(dataset.element_spec)):
        steps = [str(step) for step in path]
        if is_triple:
            steps[0] = ("x", "y", "sample_weight")[int(path[0])]
        components = tf.nest.flatten(spec, expand_composites=True)
        if leaf >= len(is_random) or not is_random[leaf]:
            shown = [part for part, component in enumerate(components) if _has_values(component)]
            found += [("/".join(steps) or "x", number + part) for part in shown]
        number += len(components)
    return found


def shown_batches(dataset: tf.data.Dataset, numbers: list[int], show: Show) -> tf.data.Dataset:
    """Returns a dataset with the same batches, of which the first of each pass and some later ones are shown.

    `show` is called in a thread of the pipeline with a name of the batch, its number in its pass, from 0, and rows of
    the parts, which have these `numbers` in the flattened batch. Names differ between passes and are the same on all
    workers.
    """

    def show_rows(name: np.ndarray, index: np.ndarray, *parts: np.ndarray) -> np.ndarray:
        show(int(name), int(index), [_some_rows(np.asarray(part)) for part in parts])
        return np.array(True)

    @tf.autograph.experimental.do_not_convert
    def look(position: tuple[tf.Tensor, tf.Tensor], batch: Any) -> Any:
        name, index = position
        is_shown = tf.reduce_any(tf.equal(index, tf.constant(_SHOWN, tf.int64)))
        tensors = tf.nest.flatten(batch, expand_composites=True)
        arguments = [name, index, *(tensors[number] for number in numbers)]
        tf.cond(is_shown, lambda: tf.numpy_function(show_rows, arguments, tf.bool), lambda: tf.constant(False))
        return batch

    # As the order of a shuffle, these numbers depend on how many iterators were created before. Threads make the first
    # draws in any order, and nobody does from an iterator that is not used.
    with global_seed_for_functions(0):  # the program's may differ between workers
        names = tf.data.Dataset.random(seed=1, rerandomize_each_iteration=True)
    positions = tf.data.Dataset.zip(names, tf.data.Dataset.range(_ENDLESS))
    positions = positions.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))
    shown = tf.data.Dataset.zip(positions, dataset).map(look)
    return shown if shown.element_spec == dataset.element_spec else dataset


def _has_values(spec: Any) -> bool:
    return isinstance(spec, tf.TensorSpec) and spec.dtype not in (tf.variant, tf.resource)


def _some_rows(rows: np.ndarray) -> np.ndarray:
    """Returns rows that are spread over a batch."""
    if rows.ndim == 0:
        return rows
    wanted = max(_VALUES * len(rows) // max(rows.size, 1), _ROWS_AT_LEAST)
    return rows[:: max(len(rows) // wanted, 1)]
