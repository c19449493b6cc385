"""Agreement between the workers of a `fit`, by values under keys that all workers see."""

import contextlib
import itertools
import json
from typing import Any

import tensorflow as tf

from tfdist.collectives.key_values import key_values

_counter = itertools.count()  # counts only those of several workers: the chief may have trained alone before


class WorkerCoordination:
    """Messages between the workers of one `fit`. Each name can be used once.

    Every worker must create its instances in the same order. A training with one worker sends no messages.
    """

    def __init__(self, rank: int, num_workers: int) -> None:
        self.rank, self.num_workers = rank, num_workers
        self._prefix = f"tfdist/recovery/{next(_counter)}" if num_workers > 1 else ""

    def wait_for_chief(self, timeout_seconds: float) -> None:
        """Waits until the chief coordinates this `fit`, too. All workers call this first.

        Raises:
            RuntimeError: If the chief does not call this, as it has no FailureRecovery.
        """
        if self.num_workers == 1:
            return
        if self.rank == 0:
            self.set("begins", True)
        elif not key_values.is_published(f"{self._prefix}/begins", timeout_seconds):
            raise RuntimeError(
                "The chief does not train with FailureRecovery. Received: FailureRecovery in the callbacks of worker "
                f"{self.rank}, and none in those of the chief within {timeout_seconds:g} s. Expected: the same one on "
                "all workers. Pass it to `fit` on every worker; if another callback of the chief takes so long before "
                "training begins, raise peer_timeout_seconds."
            )

    def broadcast(self, name: str, value: Any = None) -> Any:
        """Returns the chief's `value`, any JSON. Other workers wait for it; their `value` is ignored."""
        if self.num_workers == 1:
            return value
        if self.rank == 0:
            self.set(name, value)
        return self.wait_for(name)

    def propose(self, name: str, value: Any) -> Any:
        """Returns the value of the worker that proposes first."""
        if self.num_workers == 1:
            return value
        return json.loads(key_values.propose(f"{self._prefix}/{name}", json.dumps(value)))

    def wait_to_exit(self) -> None:
        """Waits until this worker may exit: no worker before the chief has called this, and the chief last.

        With NCCL the process of the chief contains the key-value store, and whoever uses it after that exit gets an
        error.
        """
        if self.num_workers == 1:
            return
        if self.rank == 0:
            self.set("may exit", True)
            for rank in range(1, self.num_workers):
                self.wait_for(f"exits/{rank}")
        else:
            self.wait_for("may exit")
            with contextlib.suppress(tf.errors.OpError):  # the chief may exit before this worker gets the answer
                self.arrive("exits")

    def arrive(self, name: str) -> None:
        """Reports that this worker has reached `name`."""
        self.set(f"{name}/{self.rank}", True)

    def wait_for_all(self, name: str) -> None:
        """Waits until all workers have called `arrive(name)`."""
        for rank in range(self.num_workers):
            self.wait_for(f"{name}/{rank}")

    def set(self, name: str, value: Any) -> None:
        """Publishes `value` to all workers.

        Raises:
            tf.errors.AlreadyExistsError: If a worker has published a value under this name.
        """
        key_values.publish(f"{self._prefix}/{name}", json.dumps(value))

    def wait_for(self, name: str) -> Any:
        """Waits until a worker publishes `name` and returns the value. Other threads keep running."""
        return json.loads(key_values.wait_for(f"{self._prefix}/{name}"))
