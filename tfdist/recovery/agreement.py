"""What the workers of a training agree on, through the key-value store that TensorFlow's chief serves."""

import itertools
import json
from typing import Any

import tensorflow as tf

from tfdist.tensorflow_internals.server import share, shared

_agreements = itertools.count()  # those of several workers: the chief may have trained alone before


class Agreement:
    """Messages between the workers of one `fit`; every name is used once."""

    def __init__(self, rank: int, workers: int) -> None:
        """To be made by all workers, as often by each; one worker alone may make any number."""
        self.rank, self.workers = rank, workers
        self._prefix = f"tfdist/recovery/{next(_agreements)}" if workers > 1 else ""

    def from_chief(self, name: str, value: Any = None) -> Any:
        """The chief's `value`, of JSON; what the others pass does not count. Waits for it."""
        if self.workers == 1:
            return value
        if self.rank == 0:
            self.tell(name, value)
        return self.hear(name)

    def first(self, name: str, value: Any) -> Any:
        """The value of the worker that says one first."""
        if self.workers == 1:
            return value
        try:
            self.tell(name, value)
        except tf.errors.AlreadyExistsError:
            pass
        return self.hear(name)

    def meet(self, name: str) -> None:
        """Waits until all workers have called this."""
        if self.workers > 1:
            self.arrive(name)
            self.wait_for_all(name)

    def arrive(self, name: str) -> None:
        """Says that this worker has come to `name`."""
        self.tell(f"{name}/{self.rank}", True)

    def wait_for_all(self, name: str) -> None:
        """Waits until all workers have arrived at `name`."""
        for rank in range(self.workers):
            self.hear(f"{name}/{rank}")

    def tell(self, name: str, value: Any) -> None:
        """Says `value` to all workers.

        Raises:
          tf.errors.AlreadyExistsError: a worker has said something under this name.
        """
        share(f"{self._prefix}/{name}", json.dumps(value))

    def hear(self, name: str) -> Any:
        """Waits for what a worker says under `name`, in C++: other threads run on."""
        return json.loads(shared(f"{self._prefix}/{name}"))
