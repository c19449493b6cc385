"""Datasets whose batches, now and then, are shown to a function, and which are otherwise those of the user."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.tensorflow_internals.input_pipeline import calls_shard, is_per_worker, random_parts
from tfdist.tensorflow_internals.runtime import global_seed_for_functions

# The first batch of a pass, and those whose numbers, from 1, are powers of 8. Batches are numbered from 0.
_SHOWN = [8**exponent - 1 for exponent in range(21)]
_ROWS_AT_LEAST = 4
_VALUES = 1 << 16  # of an input, to look at
_ENDLESS = 1 << 62
_Policy = tf.data.experimental.AutoShardPolicy

Show = Callable[[int, int, list[np.ndarray]], None]


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
