"""What the compressors of a strategy remember (`strategy.compression_state`), as arrays under stable names."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.collectives.state import share_of
from tfdist.keras_internals.optimizers import OptimizerUpdate
from tfdist.recovery.comparison import Difference
from tfdist.recovery.replicas import by_name, name_of

PREFIX = "compression/"


class CompressionArrays:
    """The compression state of a worker's replicas, for the trainable variables of one model.

    Names are `compression/<key>/<entry>@<number>`: the variable's key in the model, the entry (residual, factor, ...),
    and the number of the replica among those that compressed gradients travel between.
    """

    def __init__(self, model: Any, keys: Mapping[int, str], rank: int, local_replicas: int) -> None:
        """Looks at the strategy of `model`.

        Args:
          model: a Keras model with an optimizer.
          keys: the variables' keys by `id(variable)`.
          rank: of this worker.
          local_replicas: how many replicas it has.
        """
        self._strategy = model.distribute_strategy
        self._state = getattr(self._strategy, "compression_state", None)
        self._rank, self._local = rank, local_replicas
        self._policy: Any = None
        self._keys: dict[str, str] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        if self._state is not None and model.optimizer is not None:
            self._policy = self._strategy.extended.replica_operations.reductions[0].policy
            # In the order in which the optimizer asks for the paths, as it gives numbers to those that come again.
            update = OptimizerUpdate(model.optimizer, model.trainable_variables)
            for variable, path, shape in zip(model.trainable_variables, update.paths, update.shapes, strict=True):
                self._keys[path] = keys[id(variable)]
                self._shapes[path] = tuple(shape)

    @property
    def replicas(self) -> int:
        """How many replicas, of all workers, compressed gradients travel between."""
        return 1 if self._state is None else int(self._state.num_replicas)

    def variables(self) -> dict[str, Any]:
        """The state of this worker's replicas, by name; nothing before the first update."""
        if self._state is None:
            return {}
        return {
            name_of(f"{PREFIX}{self._keys[path]}/{entry}", int(number.removeprefix("replica_"))): variable
            for number, replica in self._state.replicas.items()
            for path, entries in replica.entries.items()
            if path in self._keys
            for entry, variable in entries.items()
        }

    def difference(self, own: Mapping[str, np.ndarray]) -> Difference | None:
        """The first of the saved entries that this strategy's compressors would not understand."""
        expected = self._expected()
        for name, values in by_name(own).items():
            if not name.startswith(PREFIX):
                continue
            saved = tuple(next(iter(values.values())).shape)
            if expected.get(name) != saved:
                present = f"shape {expected[name]}" if name in expected else "no such state"
                return Difference(f"the compression of gradients ({name!r})", f"shape {saved}", present)
        return None

    def load(self, own: Mapping[str, np.ndarray], saved_replicas: int) -> None:
        """Puts a saved state back, or shares it out; residuals keep their sum over all replicas.

        Args:
          own: the values of `variables` on this rank; of all ranks, merged, if `saved_replicas` is another number.
          saved_replicas: `replicas` when it was saved.
        """
        paths = {key: path for path, key in self._keys.items()}
        saved: dict[int, dict[str, dict[str, tf.Tensor]]] = {}
        for name, values in by_name(own).items():
            if name.startswith(PREFIX):
                key, _, entry = name.removeprefix(PREFIX).rpartition("/")
                for number, value in values.items():
                    saved.setdefault(number, {}).setdefault(paths[key], {})[entry] = tf.constant(value)
        if not saved or self._state is None:
            return
        for number, device in self._own_numbers():
            if saved_replicas != self.replicas:
                entries = share_of(number, self.replicas, saved)
            else:
                entries = saved.get(number, {})
            replica = self._state.of_replica(number, device)
            replica.load(entries)
            for path in entries:  # so that a save before the next step has them, too
                replica.of(path, self._policy.compressor_of(path, self._shapes[path])[0], self._shapes[path])

    def _own_numbers(self) -> list[tuple[int, str]]:
        devices = list(self._strategy.extended.worker_devices)
        everyone = self._strategy.num_replicas_in_sync
        if self._local == 1 or everyone == self._local:
            return [(self._rank * self._local + index, device) for index, device in enumerate(devices)]
        return [(self._rank, devices[0])]  # a worker's first replica exchanges for all of them

    def _expected(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all entries that this strategy's policy makes, by name."""
        expected: dict[str, tuple[int, ...]] = {}
        for path, key in self._keys.items() if self._policy is not None else ():
            compressor, has_state = self._policy.compressor_of(path, self._shapes[path])
            for entry, value in compressor.initial_state(self._shapes[path]).items() if has_state else ():
                expected[f"{PREFIX}{key}/{entry}"] = tuple(value.shape)
        return expected
