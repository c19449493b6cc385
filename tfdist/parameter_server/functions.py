"""The functions that workers and servers run for one model."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.parameter_server import worker_step
from tfdist.parameter_server.encoding import Encoder
from tfdist.parameter_server.packing import Packing
from tfdist.parameter_server.place import Place
from tfdist.parameter_server.push import push
from tfdist.parameter_server.slots import Slots

Results = dict[str, Any]


class Functions:
    """Makes and keeps the functions of a model that is compiled and built.

    Not with `reduce_retracing`: what TensorFlow keeps on each worker cannot be generalized.
    """

    def __init__(
        self, model: keras.Model, strategy: Any, encoder: Encoder, slots: Slots | None, packing: Packing
    ) -> None:
        """Makes functions that push (`slots` is `None`), or that write to slots; they return what `packing` packs."""
        self._model, self._strategy = model, strategy
        self._encoder, self._slots = encoder, slots
        self._pull_dtype = strategy.pull_dtype
        self.packing = packing
        self._found = 0  # means with a divisor of their own, in the last trace
        self._own_divisors: dict[Any, int] = {}
        self.train_on_batches = tf.function(self._train_on_batches, autograph=False)
        self.train_on_iterator = tf.function(self._train_on_iterator, autograph=False)
        self.update = tf.function(self._update, autograph=False)
        self.test = tf.function(self._test, autograph=False)
        self.predict = tf.function(self._predict, autograph=False)

    def own_divisors(self, part: Sequence[Any]) -> int:
        """How many means of the losses divide by something else than the number of samples, in a step on such a part.

        Traces the function that trains on it, if that was not done yet.
        """
        leaves = tf.nest.flatten(list(part), expand_composites=True)
        key = tuple((tuple(leaf.shape), leaf.dtype) if hasattr(leaf, "shape") else None for leaf in leaves)
        if key not in self._own_divisors:
            # As many as were found last: then this is the trace that the workers will use.
            guess = Place(0, 0, 0, [1.0] * self._found).packed()
            with self._strategy.scope():
                self.train_on_batches.get_concrete_function(tuple(part), guess)
            self._own_divisors[key] = self._found
        return self._own_divisors[key]

    def _train_on_batches(self, batches: Sequence[Any], packed: tf.Tensor) -> list[tf.Tensor]:
        place = Place.unpacked(packed)
        # A batch that is pushed by itself has no parts.
        whole = None if self._slots is None and len(batches) == 1 else lambda _: place.whole
        return self._run(lambda: self._train(list(batches), place, whole))

    def _train_on_iterator(self, iterator: Any, micro_steps: int, packed: tf.Tensor) -> list[tf.Tensor]:
        place = Place.unpacked(packed)

        def train() -> Results:
            batches = [next(iterator) for _ in range(micro_steps)]
            return self._train(batches, place, lambda samples: samples * place.whole)

        return self._run(train)

    def _run(self, function: Any) -> list[tf.Tensor]:
        return list(self._strategy.run(lambda: self.packing.pack(function())))

    def _train(self, batches: list[Any], place: Place, whole: Callable[[tf.Tensor], tf.Tensor] | None) -> Results:
        computed = worker_step.compute(self._model, batches, place, self._pull_dtype, whole)
        self._found = computed.own_divisors
        if self._slots is None:
            facts = push(computed, self._model.optimizer, self._encoder)
        else:
            facts = self._slots.write(computed, place.slot, self._encoder)
        return {"facts": facts, "metrics": computed.metrics, "logs": _tensors(computed.logs)}

    def _update(self, slots: tf.Tensor, weights: tf.Tensor) -> None:
        if self._slots is None:
            raise RuntimeError("no slots")
        update = self._slots.update
        with tf.device(self._strategy.first_server):
            self._strategy.run(lambda: update(slots, weights, self._model.optimizer))

    def _test(self, batch: Any) -> list[tf.Tensor]:
        def step() -> Results:
            metrics, logs = worker_step.evaluate(self._model, batch)
            return {"metrics": metrics, "logs": _tensors(logs)}

        return self._run(step)

    def _predict(self, batch: Any) -> Any:
        return self._strategy.run(lambda: self._model.predict_step(batch))


def _tensors(logs: dict[str, Any]) -> Results:
    return {name: tf.convert_to_tensor(value) for name, value in logs.items() if not isinstance(value, dict)}
