"""Agreement between the workers of a `fit`, by values under keys that all workers see."""

import contextlib
import itertools
import json
from collections.abc import Callable
from typing import Any, Protocol

import tensorflow as tf

from tfdist.checkpoint import SavingRanks
from tfdist.collectives.key_values import key_values

_counter = itertools.count()  # counts only those of several workers: the chief may have trained alone before


class Coordination(Protocol):
    """How the workers of a `fit` agree on what is restored and saved.

    Attributes:
        rank: The rank of this worker.
        num_workers: The number of workers.
    """

    rank: int
    num_workers: int

    @property
    def is_chief(self) -> bool:
        """Whether this worker decides for all."""
        ...

    @property
    def starts_late(self) -> bool:
        """Whether the others train already, so that this worker takes their state and restores nothing."""
        ...

    def wait_for_chief(self, timeout_seconds: float) -> None:
        """Waits until the chief coordinates this `fit`, too. All workers call this first."""
        ...

    def decide(self, name: str, find: Callable[[], Any]) -> Any:
        """Returns what `find`, which the chief calls, returns to it: any JSON."""
        ...

    def broadcast(self, name: str, value: Any) -> Any:
        """Returns the chief's `value`, any JSON."""
        ...

    def sequence_of_save(self, first: int, following: int) -> int:
        """Returns the number of the checkpoint to save, the same on all workers.

        `first` is that of the first checkpoint of this training, `following` the one after that of the last save.
        """
        ...

    def begin_save(self, model: Any, *, is_last: bool) -> SavingRanks | None:
        """Returns the workers that save `model` after this step, `None` if this one does not.

        With `is_last` all of them leave the training then.
        """
        ...


class WorkerCoordination:
    """Messages between the workers of one `fit`. Each name can be used once.

    Every worker must create its instances in the same order. A training with one worker sends no messages.
    """

    def __init__(self, rank: int, num_workers: int) -> None:
        self.rank, self.num_workers = rank, num_workers
        self._prefix = f"tfdist/recovery/{next(_counter)}" if num_workers > 1 else ""

    @property
    def is_chief(self) -> bool:
        """Whether this worker decides for all."""
        return self.rank == 0

    @property
    def starts_late(self) -> bool:
        """All workers begin together."""
        return False

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

    def decide(self, name: str, find: Callable[[], Any]) -> Any:
        """Returns what `find`, which the chief calls, returns to it: any JSON."""
        return self.broadcast(name, find() if self.is_chief else None)

    def sequence_of_save(self, first: int, following: int) -> int:
        """Returns the number of the checkpoint to save: checkpoints are counted."""
        del first
        return following

    def begin_save(self, model: Any, *, is_last: bool) -> SavingRanks:
        """All workers save."""
        del model, is_last
        return SavingRanks(tuple(range(self.num_workers)))

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

    def send(self, to: int, name: str, value: Any) -> None:
        """Sends `value`, any JSON, to one worker."""
        key_values.publish(f"{self._prefix}/{name}/{self.rank} to {to}", json.dumps(value), only_for=to)

    def receive(self, sender: int, name: str, timeout_seconds: float) -> Any:
        """Waits for what a worker has sent to this one; returns None if it has sent nothing in time."""
        key = f"{self._prefix}/{name}/{sender} to {self.rank}"
        return json.loads(key_values.take(key)) if key_values.is_published(key, timeout_seconds) else None

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
