"""The state that compressors keep from step to step: variables of each replica, which checkpoints save."""

import json
from collections import UserDict, UserList
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist.compression import Compressor, Policy
from tfdist.tensorflow_internals.tensorflow_symbols import ResourceVariable

# Entries whose sum over the replicas matters. All others are equal on all replicas.
SUMMED_ENTRIES = ("residual", "velocity")


class ReplicaState(tf.Module):
    """The compression state of one replica: the entries of compressors' states, by path of the variable."""

    def __init__(self, device: str) -> None:
        super().__init__(name="replica_state")
        self._device = device
        self.entries: dict[str, dict[str, tf.Variable]] = {}
        # A UserDict, because a dict would become a part of checkpoints.
        self._pending: UserDict[str, dict[str, tf.Tensor]] = UserDict()

    def of(
        self, path: str, compressor: Compressor, shape: Sequence[int], device: str | None = None
    ) -> dict[str, tf.Variable]:
        """Returns the variables with the state of `compressor` for the variable at `path`; creates missing ones.

        With a `device`, those on other devices are replaced by equal ones on it; otherwise new ones are on the device
        of the replica.
        """
        with tf.init_scope(), tf.device(device or self._device):
            initial = compressor.initial_state(shape)
            if path not in self.entries:
                self.entries[path] = {}  # Not `setdefault`, which TensorFlow's dict wrapper does not track.
            known = self.entries[path]
            for name, value in initial.items():
                is_elsewhere = name in known and device is not None and known[name].device != device
                if name not in known or is_elsewhere:
                    value = known[name] if is_elsewhere else self._pending.get(path, {}).pop(name, value)
                    known[name] = ResourceVariable(tf.identity(value), trainable=False, name=f"compression_{name}")
        return {name: known[name] for name in initial}

    def load(self, values: Mapping[str, Mapping[str, tf.Tensor]]) -> None:
        """Assigns `values`, or keeps them until their variables are created."""
        for path, entries in values.items():
            for name, value in entries.items():
                known = self.entries.get(path, {})
                if name in known:
                    known[name].assign(value)
                else:
                    self._pending.setdefault(path, {})[name] = value


class CompressionState(tf.Module):
    """The compression state of a worker's replicas. Save it with the model.

    Each worker saves the state of its replicas, under their numbers:

    ```python
    checkpoint = tf.train.Checkpoint(model=model, compression=strategy.compression_state)
    prefix = checkpoint.save(f"{folder}/rank-{strategy.rank}/state")
    ```

    If the number of workers is the same as before, each restores its own checkpoint. If it is not, each restores the
    model from any of the checkpoints, and calls `restore` with the prefixes of all of them.
    """

    def __init__(
        self,
        policy: Policy | None = None,
        devices: Sequence[str] = (),
        shape_of: Callable[[Any], tuple[int, ...]] | None = None,
        ways: int = 1,
    ) -> None:
        """Creates an empty state.

        Args:
            policy: Chooses the compressors that keep it; None if there are none.
            devices: The devices of the replicas that keep a state, if all are in this process and are not the replicas
                of the strategy.
            shape_of: Returns the shape of what a replica has of a Keras variable; by default all of it.
            ways: How many neighbours among `devices` have the same gradients, or parts of them.
        """
        super().__init__(name="compression_state")
        self.shape_of = shape_of or (lambda variable: tuple(variable.shape))
        self.policy, self.ways = policy, ways
        self.devices: UserList[str] = UserList(devices)
        self.replicas: dict[str, ReplicaState] = {}
        self.num_replicas = max(len(devices), 1)  # Replicas of all workers that keep a state.
        self._saved: UserDict[int, dict[str, dict[str, tf.Tensor]]] = UserDict()
        self.saved_ways = _SavedWays(self)

    def replica_state(self, number: int, device: str) -> ReplicaState:
        """Returns the state of replica `number`, which is on `device`."""
        name = f"replica_{number}"
        if name not in self.replicas:
            self.replicas[name] = ReplicaState(device)
            if self._saved:  # `restore` was called before the first step.
                with tf.init_scope():
                    self.replicas[name].load(redistribute(number, self.num_replicas, self._saved))
        return self.replicas[name]

    def restore(self, prefixes: Sequence[str]) -> None:
        """Loads the state that another number of workers has saved.

        Args:
            prefixes: One checkpoint of each of those workers (what `tf.train.Checkpoint.save` returned), the same and
                in the same order on all present workers.

        Raises:
            ValueError: The checkpoints hold no compression state, or two of them hold that of the same replica, or that
                of a tensor-parallel training with another number of devices in a stage.
        """
        saved: dict[int, dict[str, dict[str, tf.Tensor]]] = {}
        for prefix in prefixes:
            reader = tf.train.load_checkpoint(prefix)
            of_prefix = _saved_state(reader)
            _check_ways(_saved_ways(reader), self.ways)
            twice = sorted(set(of_prefix) & set(saved))
            if twice:
                raise ValueError(
                    f"Two checkpoints hold the state of replica {twice[0]}. Received: {list(prefixes)}. Expected: one "
                    "checkpoint of each worker, all of the same step."
                )
            saved.update(of_prefix)
        if not saved:
            raise ValueError(
                f"The checkpoints hold no compression state. Received: {list(prefixes)}. Expected: checkpoints saved "
                "by tf.train.Checkpoint(..., compression=strategy.compression_state)."
            )
        self._saved.data = saved
        for name, replica in self.replicas.items():
            replica.load(redistribute(int(name.removeprefix("replica_")), self.num_replicas, saved))


def redistribute(
    number: int, size: int, saved: Mapping[int, Mapping[str, Mapping[str, tf.Tensor]]]
) -> dict[str, dict[str, tf.Tensor]]:
    """Returns the state of replica `number` of `size` from the states that another number of replicas has saved.

    Residuals and velocities of the old replicas `i` with `i % size == number` are added up, so that their sum over all
    replicas does not change. All other entries are equal on all replicas; those of the first are used.

    States are by number of the old replica, path and entry.
    """
    share: dict[str, dict[str, tf.Tensor]] = {}
    first = saved[min(saved)]
    for path, entries in first.items():
        share[path] = {name: tf.zeros_like(value) if name in SUMMED_ENTRIES else value for name, value in entries.items()}
    for old, state in saved.items():
        for path, entries in state.items():
            for name, value in entries.items():
                if name in SUMMED_ENTRIES and old % size == number:
                    known = share.setdefault(path, {})
                    known[name] = known[name] + value if name in known else value
    return share


def _saved_state(reader: Any) -> dict[int, dict[str, dict[str, tf.Tensor]]]:
    entries_of_replicas: dict[int, dict[str, dict[str, tf.Tensor]]] = {}
    for key in reader.get_variable_to_shape_map():
        parts = key.split("/")
        if parts[-2:] != [".ATTRIBUTES", "VARIABLE_VALUE"]:
            continue
        for index, part in enumerate(parts):
            if part == "replicas" and parts[index + 1].startswith("replica_") and parts[index + 2] == "entries":
                path, name = (_unescaped(p) for p in parts[index + 3 : index + 5])
                number = int(parts[index + 1].removeprefix("replica_"))
                entries_of_replicas.setdefault(number, {}).setdefault(path, {})[name] = tf.constant(
                    reader.get_tensor(key)
                )
    return entries_of_replicas


def _unescaped(part: str) -> str:
    # TensorFlow writes "/" in a key as ".S", and "." as "..".
    return part.replace("..", "\0").replace(".S", "/").replace("\0", ".")


_KEY = "saved_ways/.ATTRIBUTES/py_state"


class _SavedWays(tf.train.experimental.PythonState):
    """The number of devices of a stage, which `tf.train.Checkpoint` saves, and compares when it restores.

    Without a state of compressors any number fits.
    """

    def __init__(self, state: CompressionState) -> None:
        super().__init__()
        self._compression_state = state

    def serialize(self) -> str:
        has_state = any(replica.entries for replica in self._compression_state.replicas.values())
        return json.dumps(self._compression_state.ways if has_state else 0)

    def deserialize(self, string_value: Any) -> None:
        _check_ways(json.loads(string_value), self._compression_state.ways)


def _saved_ways(reader: Any) -> int:
    """Returns the number in a checkpoint; 0 if it has none, as those of earlier releases."""
    keys = [key for key in reader.get_variable_to_shape_map() if key.endswith(_KEY)]
    return int(json.loads(reader.get_tensor(keys[0]))) if keys else 0


def _check_ways(saved: int, present: int) -> None:
    """Raises a ValueError if the residuals of a checkpoint, if there are any, do not fit the devices of a stage."""
    if saved not in (0, present):
        raise ValueError(
            f"The compression state of a checkpoint does not fit the devices of a stage. Received: that of {saved} "
            f"devices in each stage. Expected: {present}, as in this strategy: with others, the sum of residuals would "
            "be another one. Use a layout map over as many devices, or restore the model alone, without "
            "`compression=strategy.compression_state`: then residuals begin at zero."
        )
