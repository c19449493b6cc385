"""Waits until all servers of a chief have started, and names those that are lost."""

import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist.cluster import why_unreachable

_CONNECT_SECONDS = 1.0
# On a slow link that is busy with other data, a packet waits for seconds or is lost and sent again.
SLOW_LINK_SECONDS = 30.0
_POLL_SECONDS = 0.5
_CHECK_INTERVAL_SECONDS = 1.0
_CHECKS_UNTIL_LOST = 3  # a loaded host may miss one


def wait_for_servers(cluster: Mapping[str, Sequence[str]], limit_seconds: float) -> None:
    """Waits until all parameter servers and workers accept connections; the TimeoutError names the others."""
    missing = {
        f"{job} {index}": address for job in ("ps", "worker") for index, address in enumerate(cluster.get(job, ()))
    }
    deadline = time.monotonic() + limit_seconds
    while True:
        missing = {name: address for name, address in missing.items() if not is_reachable(address)}
        if not missing:
            return
        if time.monotonic() > deadline:
            named = ", ".join(f"{name} at {address}" for name, address in missing.items())
            raise TimeoutError(
                f"The cluster was not complete after {limit_seconds:g} s. Received: no answer from {named}. Expected: "
                "a process there that serves (tfdist run starts them; without it, run the script as every task, or "
                "python -m tfdist.servers with the task's TF_CONFIG). Start them, open their ports, or raise "
                "start_timeout_seconds."
            )
        time.sleep(_POLL_SECONDS)


def is_reachable(address: str, seconds: float = _CONNECT_SECONDS) -> bool:
    """Whether a process accepts connections at `address`, a "host:port", within `seconds`."""
    return why_unreachable(address, seconds) is None


class _LongCheck:
    """A check of an address in the background, with the time that a busy slow link needs; `result` is None before its
    end.
    """

    def __init__(self, address: str) -> None:
        self.result: bool | None = None
        threading.Thread(target=self._run, args=(address,), name="tfdist checks a server", daemon=True).start()

    def _run(self, address: str) -> None:
        self.result = is_reachable(address, SLOW_LINK_SECONDS)


class ServerMonitor:
    """Checks whether the tasks of a job ("ps" or "worker") that hold variables still accept connections."""

    def __init__(self, job: str, addresses: Sequence[str]) -> None:
        self._job, self._addresses = job, list(addresses)
        self._checked_at = time.monotonic()
        self._misses = [0] * len(self._addresses)
        self._long_checks: dict[int, _LongCheck] = {}

    def check(self) -> None:
        """Checks the servers, at most once a second. Call this repeatedly while waiting for results.

        A server whose host refuses the connection is lost after three checks. One that does not answer at all may be
        behind a link that is busy: it gets 30 s. The error is an UnavailableError.
        """
        if time.monotonic() < self._checked_at + _CHECK_INTERVAL_SECONDS:
            return
        self._misses = [self._misses_after_check(index) for index in range(len(self._addresses))]
        self._checked_at = time.monotonic()
        lost = [index for index, count in enumerate(self._misses) if count >= _CHECKS_UNTIL_LOST]
        if lost:
            raise self._error(lost)

    def _misses_after_check(self, index: int) -> int:
        if (check := self._long_checks.get(index)) is not None:
            if check.result is None:
                return self._misses[index]
            del self._long_checks[index]
            return 0 if check.result else _CHECKS_UNTIL_LOST
        began = time.monotonic()
        if is_reachable(self._addresses[index]):
            return 0
        if time.monotonic() - began >= _CONNECT_SECONDS:
            self._long_checks[index] = _LongCheck(self._addresses[index])
            return self._misses[index]
        return self._misses[index] + 1

    def explain(self, error: tf.errors.OpError) -> None:
        """If servers are lost, raises an UnavailableError that names them, with `error` as its cause."""
        if lost := [index for index, address in enumerate(self._addresses) if not is_reachable(address)]:
            raise self._error(lost) from error

    def _error(self, lost: Sequence[int]) -> tf.errors.UnavailableError:
        named = ", ".join(f"{self._job} {index} at {self._addresses[index]}" for index in lost)
        return tf.errors.UnavailableError(
            None,
            None,
            f"A server was lost, with the variables that it held. Received: no answer from {named}. Expected: all "
            f"{len(self._addresses)} of them until the training ends. Start the training again: FailureRecovery "
            "resumes it from the newest complete checkpoint; tfdist run --max-restarts R restarts it automatically.",
        )


def explains_lost_servers(method: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a method of an object with `servers`, a `ServerMonitor`: TensorFlow's errors name lost servers."""

    @functools.wraps(method)
    def explained(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except tf.errors.OpError as error:
            self.servers.explain(error)
            raise

    return explained
