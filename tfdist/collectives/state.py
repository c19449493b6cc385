"""What compressors must remember from step to step: variables of each replica, which checkpoints save."""

from collections import UserDict
from collections.abc import Mapping, Sequence

import tensorflow as tf

from tfdist.compression import Compressor
from tfdist.tensorflow_internals.symbols import ResourceVariable

# Entries of which the replicas' sum counts; all others are equal on all replicas.
_SUMMED = ("residual", "velocity")


class ReplicaState(tf.Module):
    """The compression state of one replica: for each variable's path the entries of its compressor's state."""

    def __init__(self, device: str) -> None:
        super().__init__(name="replica_state")
        self._device = device
        self.entries: dict[str, dict[str, tf.Variable]] = {}
        # A UserDict, as a dict would become a part of checkpoints.
        self._pending: UserDict[str, dict[str, tf.Tensor]] = UserDict()

    def of(self, path: str, compressor: Compressor, shape: Sequence[int]) -> dict[str, tf.Variable]:
        """The variables that hold the state of `compressor` for the variable at `path`; made where they are missing."""
        with tf.init_scope(), tf.device(self._device):
            initial = compressor.initial_state(shape)
            if path not in self.entries:
                self.entries[path] = {}  # not `setdefault`, which TensorFlow's wrapper of dicts does not see
            known = self.entries[path]
            for name, value in initial.items():
                if name not in known:
                    value = self._pending.get(path, {}).pop(name, value)
                    known[name] = ResourceVariable(value, trainable=False, name=f"compression_{name}")
        return {name: known[name] for name in initial}

    def load(self, values: Mapping[str, Mapping[str, tf.Tensor]]) -> None:
        """Takes over `values`, at once or, for variables that have not been made yet, when they are."""
        for path, entries in values.items():
            for name, value in entries.items():
                known = self.entries.get(path, {})
                if name in known:
                    known[name].assign(value)
                else:
                    self._pending.setdefault(path, {})[name] = value


class CompressionState(tf.Module):
    """The compression state of a worker's replicas, to be saved beside the model.

    Every worker saves its own replicas' state, under their numbers:

    ```python
    checkpoint = tf.train.Checkpoint(model=model, compression=strategy.compression_state)
    prefix = checkpoint.save(f"{folder}/rank-{strategy.rank}/state")
    ```

    With as many workers as before each one restores its own checkpoint. After a change of their number each one
    restores the model from any of the checkpoints, and calls `restore` with the prefixes of all of them.
    """

    def __init__(self) -> None:
        super().__init__(name="compression_state")
        self.replicas: dict[str, ReplicaState] = {}
        self.num_replicas = 1  # that keep a state, of all workers
        self._saved: UserDict[int, dict[str, dict[str, tf.Tensor]]] = UserDict()

    def of_replica(self, number: int, device: str) -> ReplicaState:
        """The state of the replica `number`, kept on `device`."""
        name = f"replica_{number}"
        if name not in self.replicas:
            self.replicas[name] = ReplicaState(device)
            if self._saved:  # by a `restore` before the first step
                with tf.init_scope():
                    self.replicas[name].load(share_of(number, self.num_replicas, self._saved))
        return self.replicas[name]

    def restore(self, prefixes: Sequence[str]) -> None:
        """Loads the state that some number of workers have saved, whatever the number of workers is now.

        Args:
          prefixes: one checkpoint of each of those workers (what `tf.train.Checkpoint.save` returned), the same and in
            the same order on all workers of today.

        Raises:
          ValueError: the checkpoints hold no state of compression, or two of them that of the same replica.
        """
        saved: dict[int, dict[str, dict[str, tf.Tensor]]] = {}
        for prefix in prefixes:
            of_prefix = _saved_state(prefix)
            twice = sorted(set(of_prefix) & set(saved))
            if twice:
                raise ValueError(
                    f"Two checkpoints hold the state of replica {twice[0]}. Received: {list(prefixes)}. Expected: one "
                    "checkpoint of each worker, all of one step."
                )
            saved.update(of_prefix)
        if not saved:
            raise ValueError(
                f"The checkpoints hold no compression state. Received: {list(prefixes)}. Expected: checkpoints saved "
                "by tf.train.Checkpoint(..., compression=strategy.compression_state)."
            )
        self._saved.data = saved
        for name, replica in self.replicas.items():
            replica.load(share_of(int(name.removeprefix("replica_")), self.num_replicas, saved))


def share_of(
    number: int, size: int, saved: Mapping[int, Mapping[str, Mapping[str, tf.Tensor]]]
) -> dict[str, dict[str, tf.Tensor]]:
    """What replica `number` of `size` takes over of the states that other replicas have saved.

    Residuals and velocities of the old replicas `i` with `i % size == number` are added up, so that their sum over
    all replicas stays what it was; the rest is equal on all replicas, and taken from the first.

    Args:
      number: of this replica, from 0.
      size: how many replicas there are now.
      saved: the states by the old replicas' numbers: path, entry, value.
    """
    share: dict[str, dict[str, tf.Tensor]] = {}
    first = saved[min(saved)]
    for path, entries in first.items():
        share[path] = {name: tf.zeros_like(value) if name in _SUMMED else value for name, value in entries.items()}
    for old, state in saved.items():
        for path, entries in state.items():
            for name, value in entries.items():
                if name in _SUMMED and old % size == number:
                    known = share.setdefault(path, {})
                    known[name] = known[name] + value if name in known else value
    return share


def _saved_state(prefix: str) -> dict[int, dict[str, dict[str, tf.Tensor]]]:
    reader = tf.train.load_checkpoint(prefix)
    found: dict[int, dict[str, dict[str, tf.Tensor]]] = {}
    for key in reader.get_variable_to_shape_map():
        parts = key.split("/")
        if parts[-2:] != [".ATTRIBUTES", "VARIABLE_VALUE"]:
            continue
        for index, part in enumerate(parts):
            if part == "replicas" and parts[index + 1].startswith("replica_") and parts[index + 2] == "entries":
                path, name = (_unescaped(p) for p in parts[index + 3 : index + 5])
                number = int(parts[index + 1].removeprefix("replica_"))
                found.setdefault(number, {}).setdefault(path, {})[name] = tf.constant(reader.get_tensor(key))
    return found


def _unescaped(part: str) -> str:
    # TensorFlow writes "/" in a key as ".S", and "." as "..".
    return part.replace("..", "\0").replace(".S", "/").replace("\0", ".")
