"""Compares the loss and gradients of the same rows, which all replicas compute, and names those that are wrong."""

import logging
import math
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.callbacks.replica_votes import (
    RESTART,
    TEST_MEMORY,
    DifferentReplicasError,
    exclude_workers,
    name_of,
    values_of_replicas,
    vote,
)
from tfdist.callbacks.weight_hashes import hash_all, hash_arrays
from tfdist.data_position.resumable_iterator import patch_epoch_iterator
from tfdist.keras_internals.compiled_loss import has_compiled_loss
from tfdist.keras_internals.model_introspection import first_input
from tfdist.keras_internals.model_state import WEIGHT, components, model_variables
from tfdist.keras_internals.running_fit import running_fit
from tfdist.keras_internals.stateless_gradients import loss_and_gradients, rounding_error
from tfdist.tensorflow_internals.rows_per_replica import is_complete, without_filled_rows
from tfdist.training.sample_shares import number_of_samples, rows_between, rows_of_part
from tfdist.training.step_guard import LastBatch
from tfdist.training.strategy_protocol import training_strategy
from tfdist.utils.argument_checks import is_number

_log = logging.getLogger("tfdist")
_CPU_FILE = "/proc/cpuinfo"
_CPU_LINES = ("model name", "flags", "Features", "CPU part", "cache size")  # by which libraries choose their code
_COMPUTATIONS = 2  # of each replica, so that of two workers the one whose fault passes has no majority
_PROJECTIONS = 4
_LENGTH_BYTES = 8
_Computed = tuple[int, list[np.ndarray]]  # the hash of loss and gradients, and these
_NUMBERS = 2 + _PROJECTIONS  # of a sketch: the loss, the norm of the gradients, their projections
_CAUSES = f"A broken core or faulty memory causes this. {TEST_MEMORY} and processor."


class DifferentGradientsError(DifferentReplicasError):
    """Replicas with equal weights have computed different gradients of the same rows.

    Attributes:
        ranks: The workers with other gradients than the majority; all workers if there is no majority.
    """


def check_fraction(fraction: Any) -> None:
    """Checks `check_gradients`, and prepares `fit` for it."""
    if fraction is None:
        return
    if not is_number(fraction, at_least=0) or not 0 < fraction <= 1:
        raise ValueError(
            f"Invalid `check_gradients`. Received: check_gradients={fraction!r}. Expected: a fraction of the rows of a "
            "step, above 0 and at most 1, or None."
        )
    patch_epoch_iterator()


class GradientComparison:
    """Lets all replicas compute loss and gradients of rows of one worker, twice on each, in a running `fit`."""

    def __init__(self, fraction: float, model: Any) -> None:
        """Makes `fit` keep the batch of the last step.

        Raises:
            ValueError: The model has no loss that is known, or a static batch size, or `fit` does not run.
        """
        fit, reason = running_fit(model), ""
        if fit is None:
            reason = "a loop of the program, whose batches are not known"
        elif not has_compiled_loss(model):
            reason = "a model with neither a compiled loss nor a `compute_loss`, whose `train_step` alone knows it"
        elif any(tensor.shape[0] is not None for tensor in tf.nest.flatten(getattr(model, "inputs", None) or [])):
            reason = "a model with a static batch size, which does not compute fewer rows"
        if fit is None or reason:
            raise ValueError(
                f"`check_gradients` computes some rows of a batch again. Received: {reason}. Expected: `fit` of a "
                "model that is compiled with a loss, for batches of any size. Leave `check_gradients` out to compare "
                "weights only."
            )
        self._fraction, self._model, self._strategy = fraction, model, training_strategy(model.distribute_strategy)
        self._last = self._strategy.last_batch = LastBatch(model)
        self._has_warned = False
        fit.on_end(self._end)
        model.make_train_function(force=True)

    def _end(self) -> None:
        self._strategy.last_batch = None
        self._last.batch = self._model.train_function = None

    def compare(self, number: int, step: int) -> None:
        """Compares now. All workers call this between the same two steps, when their weights are equal.

        Args:
            number: The number of this comparison, which says whose turn it is to send rows.
            step: The number of the last step, for messages.

        Raises:
            DifferentGradientsError: Gradients differ by more than rounding; see `WeightComparison`.
        """
        rows = self._rows()
        found = [one for one in model_variables(self._model) if isinstance(one.variable, keras.Variable)]
        # Batch statistics and seeds may differ between workers: those of the sender count.
        states = [components(self._strategy, one.variable)[0] for one in found if one.kind != WEIGHT]
        tensors = [*tf.nest.flatten(rows, expand_composites=True), *(tf.convert_to_tensor(state) for state in states)]
        sent = np.zeros(0, np.int64) if rows is None or not _count(rows) else _encoded(tensors)
        received = self._received(number, sent)
        if received is None:
            return
        # One that has not joined yet repeats the exchanges of the others.
        votes = rows is not None and self._trains
        computed = self._compute(rows, _decoded(received, tensors), found) if votes else []
        own = np.zeros([self._devices, _COMPUTATIONS], np.int64)
        own[: len(computed)] = [[hashed for hashed, _ in of_device] for of_device in computed] if votes else 0
        hashes = values_of_replicas(self._strategy, own, has_values=votes)
        if len({int(value) for row in hashes.values() for value in row}) > 1:
            self._judge(computed, step)

    @property
    def _devices(self) -> int:
        return self._strategy.replicas_of_workers[self._strategy.rank]

    def _rows(self) -> Any:
        """Returns the rows that this worker would send, as `fit` gets them, maybe none; `None` before its first step.

        They are those of its first device that has some.
        """
        batch = self._last.batch
        if batch is None:
            return None
        data, local_results = without_filled_rows(batch), self._model.distribute_strategy.experimental_local_results
        for device in range(self._devices):
            rows = tf.nest.map_structure(lambda leaf, at=device: _of_device(local_results(leaf), at), data)
            if is_complete(batch):  # all workers have all rows
                rows = rows_of_part(rows, first_input(rows), self._strategy.rank, self._strategy.num_workers)
            if _count(rows):
                break
        return rows_between(rows, first_input(rows), 0, math.ceil(self._fraction * _count(rows)))

    def _received(self, number: int, own: np.ndarray) -> np.ndarray | None:
        """Returns what the worker sends whose turn it is; `None` if none has rows, or that one is lost."""
        sizes = self._strategy.values_of_workers(np.array([1, len(own)]))
        self._trains = bool(sizes[self._strategy.rank, 0])
        senders = np.flatnonzero(sizes[:, 1])
        if not len(senders):
            return None
        sender = int(senders[number % len(senders)])
        values = np.zeros(1 + int(sizes[sender, 1]), np.int64)
        if sender == self._strategy.rank and self._trains:
            values[0], values[1:] = 1, own
        received = self._strategy.values_of_workers(values)[sender]
        return received[1:] if received[0] else None

    def _compute(self, rows: Any, received: Sequence[tf.Tensor], variables: Sequence[Any]) -> list[list[_Computed]]:
        """Returns the computations of each device."""
        leaves = len(tf.nest.flatten(rows, expand_composites=True))
        data = tf.nest.pack_sequence_as(rows, received[:leaves], expand_composites=True)
        states = iter(received[leaves:])
        copies = [
            components(self._strategy, one.variable) if one.kind == WEIGHT else [next(states)] * self._devices
            for one in variables
        ]
        devices = self._model.distribute_strategy.extended.worker_devices
        computed: list[list[_Computed]] = [[] for _ in devices]
        kept: dict[int, list[np.ndarray]] = {}  # equal gradients once
        for _ in range(_COMPUTATIONS):
            for device, name in enumerate(devices):
                with tf.device(name):
                    values = [tf.convert_to_tensor(copy[device]) for copy in copies]
                    results = loss_and_gradients(self._model, [one.variable for one in variables], values, data)
                arrays = [result.numpy() for result in results]
                hashed = hash_all(hash_arrays(arrays))
                computed[device].append((hashed, kept.setdefault(hashed, arrays)))
        return computed

    def _judge(self, computed: Sequence[Sequence[_Computed]], step: int) -> None:
        """Compares what may differ by rounding, and ends workers whose gradients differ by more."""
        sketches = {hashed: _sketch(arrays) for of_device in computed for hashed, arrays in of_device}
        own = np.zeros([self._devices, 2 + _COMPUTATIONS * _NUMBERS])
        own[:, 0] = math.sqrt(rounding_error(self._model))
        own[:, 1] = [_processor(name) for name in self._model.distribute_strategy.extended.worker_devices]
        for device, of_device in enumerate(computed):
            own[device, 2:] = np.concatenate([sketches[hashed] for hashed, _ in of_device])
        by_replica = values_of_replicas(self._strategy, own.view(np.int64), has_values=bool(computed))
        numbers = {replica: row.view(np.float64) for replica, row in by_replica.items()}
        tolerance = max((row[0] for row in numbers.values()), default=0.0)
        found = {
            (*replica, index): row[2:].reshape(_COMPUTATIONS, _NUMBERS)[index]
            for replica, row in numbers.items()
            for index in range(_COMPUTATIONS)
        }
        if not found:
            return
        # Rounding may lead from one to another that is too far from a third: the one in the middle decides.
        close = {one: [other for other in found if _is_close(found[one], found[other], tolerance)] for one in found}
        middle = max(close, key=lambda one: len(close[one]))
        verdict = vote({one: middle if one in close[middle] else one for one in found})
        computations = f"{len(found)} computations of {len(numbers)} replicas after step {step}"
        if not verdict.differing:
            return
        names = [f"{name_of(self._strategy, one)}: {_described(found[one])}" for one in verdict.differing]
        # Rounding exceeds any tolerance where gradients of rows nearly cancel, and it depends on the processor.
        unsteady = {one[:2] for one in found if not _is_close(found[*one[:2], 0], found[*one[:2], 1], tolerance)}
        judges = [one for one in found if one not in verdict.differing] or list(found)
        processors = {numbers[one[:2]][1] for one in judges}
        is_clear = verdict.majority is not None or len(processors) == 1
        judged = [
            one for one in verdict.differing if one[:2] in unsteady or (is_clear and numbers[one[:2]][1] in processors)
        ]
        if not judged:
            if not self._has_warned:
                _log.warning(
                    "`check_gradients` finds different gradients on different processors, which may be rounding, and "
                    "excludes nobody. Received: %s; of %s. Expected: equal processors for a decision. This is said "
                    "once.",
                    "; ".join(names),
                    computations,
                )
            self._has_warned = True
            return
        ranks = sorted({rank for rank, *_ in judged})
        if verdict.majority is None and is_clear:
            raise DifferentGradientsError(
                "The replicas compute different gradients of the same rows, and nobody knows which are right. "
                f"Received: {'; '.join(names)}; of {computations}. Expected: equal loss and gradients, to rounding, of "
                f"more than half. {RESTART} Three workers decide by majority. {_CAUSES}",
                ranks,
            )
        exclude_workers(
            self._strategy,
            DifferentGradientsError,
            f"Replicas compute other gradients than the majority. Received: {'; '.join(names)}; of {computations}. "
            f"Expected: {_described(found[middle])}, to rounding, by equal weights of the same rows. %s {_CAUSES}",
            ranks,
        )


def _of_device(results: Sequence[Any], device: int) -> Any:
    return results[min(device, len(results) - 1)]  # what is not distributed is the same for all


def _count(rows: Any) -> int:
    return int(number_of_samples(first_input(rows)))


def _encoded(tensors: Sequence[tf.Tensor]) -> np.ndarray:
    """Returns tensors of any dtype as int64 values."""
    parts = [tf.io.serialize_tensor(tensor).numpy() for tensor in tensors]
    data = b"".join(len(part).to_bytes(_LENGTH_BYTES, "little") + part for part in parts)
    return np.frombuffer(data.ljust(-(-len(data) // 8) * 8, b"\0"), np.int64)


def _decoded(values: np.ndarray, like: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the tensors of `_encoded`, which have the dtypes of `like`."""
    data, at, tensors = values.tobytes(), 0, []
    for tensor in like:
        begin = at + _LENGTH_BYTES
        at = begin + int.from_bytes(data[at:begin], "little")
        tensors.append(tf.io.parse_tensor(data[begin:at], tensor.dtype))
    return tensors


def _sketch(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the loss, the norm of all gradients, and their sums with random signs, which are equal on all workers.

    Two gradients whose difference has a norm D have projections that differ by about D.
    """
    loss, *gradients = arrays
    squares: list[Any] = []
    projections = np.zeros(_PROJECTIONS)
    with np.errstate(all="ignore"):
        for number, gradient in enumerate(gradients):
            values = gradient.astype(np.float64).reshape(-1)
            squares.append(values @ values)
            generator = np.random.default_rng(number)
            for place in range(_PROJECTIONS):
                signs = generator.integers(0, 2, len(values), np.int8) * 2 - 1
                projections[place] += signs @ values
        return np.array([np.float64(loss), np.sqrt(np.sum(squares)), *projections])


def _is_close(one: np.ndarray, other: np.ndarray, tolerance: float) -> bool:
    if not (np.isfinite(one).all() and np.isfinite(other).all()):
        return np.array_equal(one, other, equal_nan=True)
    loss, norm = np.maximum(np.abs(one[:2]), np.abs(other[:2]))
    return bool((np.abs(one - other) <= tolerance * np.array([loss, *[norm] * (_NUMBERS - 1)])).all())


def _processor(device: str) -> int:
    """Returns a number of a device's kind of processor: those of one kind round alike, if they compute in one order."""
    gpus = tf.config.list_physical_devices("GPU") if "GPU" in device else []
    kinds = {str(tf.config.experimental.get_device_details(gpu).get("device_name")) for gpu in gpus}
    path = Path(_CPU_FILE)
    lines = (
        path.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0].splitlines() if path.exists() else []
    )
    kinds |= {line for line in lines if line.startswith(_CPU_LINES)}
    # Sums are divided among threads.
    kinds.add(f"{len(os.sched_getaffinity(0))} cores, {tf.config.threading.get_intra_op_parallelism_threads()} threads")
    return zlib.crc32("\n".join(sorted(kinds)).encode())


def _described(sketch: np.ndarray) -> str:
    return f"loss {sketch[0]:.9g}, gradient norm {sketch[1]:.9g}"
