"""The TensorFlow functions that workers and servers run for a model."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.model_introspection import first_input
from tfdist.losses.divided_rows import DividedRows
from tfdist.parameter_server import worker_step
from tfdist.parameter_server.batch_split import PartInfo
from tfdist.parameter_server.gradient_buffers import GradientBuffers
from tfdist.parameter_server.gradient_push import GradientEncoder, Push
from tfdist.parameter_server.step_results import ResultPacking

Results = dict[str, Any]

_FIRST_SERVER = "/job:ps/task:0/device:CPU:0"


class WorkerFunctions:
    """The functions of a model that is compiled and built.

    They are not created with `reduce_retracing`: TensorFlow cannot generalize what it keeps on each worker.
    """

    def __init__(
        self,
        model: keras.Model,
        strategy: Any,
        encoder: GradientEncoder,
        buffers: GradientBuffers | None,
        packing: ResultPacking,
    ) -> None:
        """Creates the functions of a built model.

        Without buffers for parts of rounds gradients are pushed to the variables.
        """
        self._model, self._strategy = model, strategy
        self._encoder, self._buffers, self._packing = encoder, buffers, packing
        self._last_num_normalizers = 0  # of the last trace
        self._num_normalizers: dict[Any, int] = {}
        self._is_last = True  # of the last trace
        self.train_on_batches = tf.function(self._train_on_batches, autograph=False)
        self.train_on_iterator = tf.function(self._train_on_iterator, autograph=False)
        self.update = tf.function(self._update, autograph=False)
        self.test = tf.function(self._test, autograph=False)
        self.predict = tf.function(self._predict, autograph=False)

    def num_normalizers(self, part: Sequence[Any], phase: int) -> int:
        """Returns how many means in the losses of a step on `part` do not divide by the number of samples.

        Traces the function that trains on such a part, if that was not done yet.
        """
        leaves = tf.nest.flatten(list(part), expand_composites=True)
        key = (phase, *((tuple(leaf.shape), leaf.dtype) if hasattr(leaf, "shape") else None for leaf in leaves))
        if key not in self._num_normalizers:
            # With as many as were found last: if that is right, this is the trace that the workers will use.
            guess = PartInfo(0, 0, 0, [1.0] * self._last_num_normalizers).pack()
            with self._strategy.scope():
                self.train_on_batches.get_concrete_function(tuple(part), guess, phase)
            self._num_normalizers[key] = self._last_num_normalizers
        return self._num_normalizers[key]

    def _train_on_batches(self, batches: Sequence[Any], packed: tf.Tensor, phase: int) -> list[tf.Tensor]:
        part = PartInfo.unpack(packed)
        # A push of one batch has no other parts.
        total_samples = None if self._buffers is None and len(batches) == 1 else lambda _: part.total
        return self._run(lambda: self._train(list(batches), part, total_samples, phase))

    def _train_on_iterator(self, iterator: Any, micro_steps: int, packed: tf.Tensor) -> list[tf.Tensor]:
        part = PartInfo.unpack(packed)

        def train() -> Results:
            batches = [next(iterator) for _ in range(micro_steps)]
            results = self._train(batches, part, lambda samples: samples * part.total, 0)
            if not self._is_last:
                raise ValueError(
                    "A step reads variables that it has updated before, so that a round has several phases, in each of "
                    "which workers would draw other batches. Received: such a `train_step` and a dataset that workers "
                    "create, in synchronous mode. Expected: data of the chief, or the mode Asynchronous()."
                )
            return results

        return self._run(train)

    def _run(self, function: Any) -> list[tf.Tensor]:
        return list(self._strategy.run(lambda: self._packing.pack(function())))

    def _train(
        self, batches: list[Any], part: PartInfo, total_samples: Callable[[tf.Tensor], tf.Tensor] | None, phase: int
    ) -> Results:
        parts = 1 if self._buffers is None else self._strategy.num_workers  # a push is a whole batch
        divided = self._strategy.divided_rows = DividedRows.of([first_input(batches[0]).shape[0]], parts)
        compute = functools.partial(
            worker_step.compute, self._model, batches, part, self._strategy.pull_dtype, total_samples, divided
        )
        if self._buffers is None:
            push = Push(self._model.optimizer, self._encoder, len(batches))
            result = compute(push)
            report = push.finish(result)
        else:
            result = compute(self._buffers.phase(phase))
            report = self._buffers.write(result, part.buffer, self._encoder, phase)
        self._last_num_normalizers, self._is_last = result.num_normalizers, result.is_last
        return {
            "report": report,
            "metrics": result.metrics,
            "logs": result.logs,
            "is_last": tf.constant(result.is_last),
        }

    def _update(self, used_buffers: tf.Tensor, weights: tf.Tensor, phase: int = 0) -> None:
        buffers = self._buffers
        if buffers is None:
            raise RuntimeError("no gradient buffers in asynchronous mode")
        with tf.device(_FIRST_SERVER):
            self._strategy.run(lambda: buffers.update(used_buffers, weights, self._model.optimizer, phase))

    def _test(self, batch: Any) -> list[tf.Tensor]:
        def step() -> Results:
            metrics, logs = worker_step.evaluate(self._model, batch)
            return {"metrics": metrics, "logs": logs}

        return self._run(step)

    def _predict(self, batch: Any) -> Any:
        return self._strategy.run(lambda: self._model.predict_step(batch))
