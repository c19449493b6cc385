"""Saves and restores the state of gradient compression as arrays under stable names."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.collectives.compression_state import redistribute
from tfdist.keras_internals.optimizers import unique_path
from tfdist.recovery.compatibility import Mismatch
from tfdist.recovery.resharding import group_by_variable, replica_name
from tfdist.recovery.trained_model import Trained
from tfdist.training.strategy_protocol import training_strategy

COMPRESSION = "compression/"


class CompressionArrays:
    """The compression state (`strategy.compression_state`) of a worker's replicas, for one training.

    Names are `compression/<key>/<entry>@<number>`: the key of the trainable variable in the model, the entry (residual,
    factor, ...), and the number of the replica among those that exchange compressed gradients.
    """

    def __init__(self, trained: Trained, keys: Mapping[int, str], rank: int, local_replicas: int) -> None:
        """Reads what is trained. `keys` are those of its variables by `id(variable)`."""
        self._strategy = trained.strategy
        self._state = training_strategy(self._strategy).compression_state
        self._rank, self._local_replicas = rank, local_replicas
        self._policy: Any = None
        self._keys: dict[str, str] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        variables = trained.updated_variables()
        if self._state is not None and variables:
            self._policy = self._state.policy
            for variable in variables:  # in the order in which optimizers ask: repeated paths get numbers
                path = unique_path(self._strategy, variable)
                self._keys[path] = keys[id(variable)]
                self._shapes[path] = self._state.shape_of(variable)

    @property
    def num_replicas(self) -> int:
        """The number of replicas, of all workers, that exchange compressed gradients."""
        return 1 if self._state is None else int(self._state.num_replicas)

    @property
    def ways(self) -> int:
        """How many of them have the same gradients or parts of them; 1 without tensor parallelism."""
        return 1 if self._state is None else int(self._state.ways)

    def variables(self) -> dict[str, Any]:
        """Returns the state of this worker's replicas by name; empty before the first update."""
        if self._state is None:
            return {}
        return {
            replica_name(f"{COMPRESSION}{self._keys[path]}/{entry}", int(number.removeprefix("replica_"))): variable
            for number, replica in self._state.replicas.items()
            for path, entries in replica.entries.items()
            if path in self._keys
            for entry, variable in entries.items()
        }

    def find_mismatch(self, saved: Mapping[str, np.ndarray], saved_ways: int) -> Mismatch | None:
        """Returns the first saved entry that the compressors of this strategy do not have.

        `saved_ways` is `ways` at the checkpoint: the sum of residuals over other devices would be another one.
        """
        if saved_ways != self.ways and any(name.startswith(COMPRESSION) for name in saved):
            return Mismatch("the number of devices of a stage, with compression", str(saved_ways), str(self.ways))
        expected = self._expected_shapes()
        for name, values in group_by_variable(saved).items():
            if not name.startswith(COMPRESSION):
                continue
            shape = tuple(next(iter(values.values())).shape)
            if expected.get(name) != shape:
                present = f"shape {expected[name]}" if name in expected else "no such state"
                return Mismatch(f"the compression of gradients ({name!r})", f"shape {shape}", present)
        return None

    def restore(self, saved: Mapping[str, np.ndarray], saved_replicas: int) -> None:
        """Restores the state. For another number of replicas, residuals keep their sum over all replicas.

        `saved` has the values of this rank; merged from all ranks if the number of replicas differs.
        """
        paths = {key: path for path, key in self._keys.items()}
        by_replica: dict[int, dict[str, dict[str, tf.Tensor]]] = {}
        for name, values in group_by_variable(saved).items():
            if name.startswith(COMPRESSION):
                key, _, entry = name.removeprefix(COMPRESSION).rpartition("/")
                for number, value in values.items():
                    by_replica.setdefault(number, {}).setdefault(paths[key], {})[entry] = tf.constant(value)
        if not by_replica or self._state is None:
            return
        for number, device in self._local_numbers():
            if saved_replicas != self.num_replicas:
                entries = redistribute(number, self.num_replicas, by_replica)
            else:
                entries = by_replica.get(number, {})
            replica = self._state.replica_state(number, device)
            replica.load(entries)
            for path in entries:  # creates the variables, so that a save before the next step contains them
                replica.of(path, self._policy.resolve(path, self._shapes[path])[0], self._shapes[path])

    def _local_numbers(self) -> list[tuple[int, str]]:
        if self._state is not None and self._state.devices:
            return list(enumerate(self._state.devices))
        devices = list(self._strategy.extended.worker_devices)
        num_replicas = self._strategy.num_replicas_in_sync
        if self._local_replicas == 1 or num_replicas == self._local_replicas:
            return [(self._rank * self._local_replicas + index, device) for index, device in enumerate(devices)]
        return [(self._rank, devices[0])]  # the first replica of a worker exchanges for all of them

    def _expected_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of all entries that this strategy's policy creates, by name."""
        expected: dict[str, tuple[int, ...]] = {}
        for path, key in self._keys.items() if self._policy is not None else ():
            compressor, has_state = self._policy.resolve(path, self._shapes[path])
            for entry, value in compressor.initial_state(self._shapes[path]).items() if has_state else ():
                expected[f"{COMPRESSION}{key}/{entry}"] = tuple(value.shape)
        return expected
