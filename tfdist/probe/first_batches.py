"""The first batches of a program's `fit`, as Keras would pass them to the training step, and how fast they come."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.model_introspection import first_input
from tfdist.training.sample_shares import count_samples, has_rows, rows_between

_KEPT = 2
_TIMED = 8
_MAX_SECONDS = 2.0


@dataclass(frozen=True)
class FirstBatches:
    """Global batches."""

    batches: tuple[Any, ...]  # one or two, as the training step gets them: structures of tensors
    spec: tuple[Any, ...]  # the `tf.TypeSpec`s of their leaves in order, as a step is traced with
    rows: int  # samples of a batch
    steps: int | None  # batches of an epoch, or None
    seconds: float  # median time in which the program's data produces a batch

    def dataset(self, rows: int) -> tf.data.Dataset:
        """Returns an endless dataset in memory: batches of the first `rows` samples, of sizes as static as those."""
        parts = [self.first_rows(number, rows) for number in range(len(self.batches))]
        endless = tf.data.Dataset.from_tensors(parts[0])
        for part in parts[1:]:
            endless = endless.concatenate(tf.data.Dataset.from_tensors(part))
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
        return endless.map(self._as_dynamic).repeat().with_options(options)

    def first_rows(self, number: int, rows: int) -> Any:
        """Returns the first `rows` samples of a batch."""
        batch = self.batches[number]
        counted = first_input(batch)
        return batch if counted is None or rows >= self.rows else rows_between(batch, counted, 0, rows)

    def _as_dynamic(self, *batch: Any) -> Any:
        leaves = tf.nest.flatten(batch)
        specs = self.spec if len(self.spec) == len(leaves) else [None] * len(leaves)
        mapped = [_relaxed(leaf, spec) for leaf, spec in zip(leaves, specs, strict=True)]
        structure = tf.nest.pack_sequence_as(batch, mapped)
        return structure if len(batch) > 1 else structure[0]


class _EnoughError(Exception):
    """Ends the `fit` whose batches are drawn."""


def first_batches(model: Any, fit: Callable[..., Any], arguments: Mapping[str, Any]) -> FirstBatches:
    """Draws batches by a `fit` that makes no step, without the callbacks and the validation data of its arguments."""
    drawn: list[Any] = []
    seconds: list[float] = []
    specs: list[Any] = []

    def draw(iterator: Any) -> Any:
        began = time.perf_counter()
        specs.append(getattr(iterator, "element_spec", None))
        while len(seconds) < _TIMED and (not drawn or time.perf_counter() - began < _MAX_SECONDS):
            start = time.perf_counter()
            try:
                batch = next(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                break
            seconds.append(time.perf_counter() - start)
            if len(drawn) < _KEPT:
                drawn.append(tf.nest.map_structure(_local, batch))
        raise _EnoughError

    callback = keras.callbacks.Callback()  # `fit` sets its parameters
    changed = {"callbacks": [callback], "verbose": 0, "validation_data": None}
    changed["epochs"] = max(int(arguments.get("epochs", 1)), int(arguments.get("initial_epoch", 0)) + 1)
    model.train_function = None
    # Keras tracks attributes that are set in the ordinary way.
    object.__setattr__(model, "make_train_function", lambda force=False: setattr(model, "train_function", draw))
    try:
        fit(model, **{**arguments, **changed})
    except _EnoughError:
        pass
    finally:
        object.__delattr__(model, "make_train_function")
        model.train_function = None
    if not drawn:
        raise ValueError(
            "The data of `fit` has no batch. Received: a first epoch without steps. Expected: data with at least one "
            "batch. Check the dataset and `steps_per_epoch`."
        )
    rows = [_rows(batch) for batch in drawn]
    batches = tuple(batch for batch, count in zip(drawn, rows, strict=True) if count == rows[0])
    later = seconds[1:] or seconds
    steps = (callback.params or {}).get("steps")
    return FirstBatches(batches, tuple(tf.nest.flatten(specs[0])), rows[0], steps, statistics.median(later))


def _local(value: Any) -> Any:
    return tf.distribute.get_strategy().experimental_local_results(value)[0]


def _rows(batch: Any) -> int:
    value = first_input(batch)
    return int(count_samples(value)) if value is not None and has_rows(value) else 1


def _relaxed(leaf: Any, spec: Any) -> Any:
    shape = getattr(spec, "shape", None)
    if not isinstance(leaf, tf.Tensor) or not isinstance(shape, tf.TensorShape) or shape.is_fully_defined():
        return leaf
    return tf.compat.v1.placeholder_with_default(leaf, shape)
