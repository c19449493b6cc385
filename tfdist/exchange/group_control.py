"""Control messages between all workers: who lives, what failed, who left, and values under a key."""

import contextlib
import os
import select
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from tfdist.exchange.exchange_errors import (
    HAS_LEFT,
    NO_MESSAGE,
    ExchangeError,
    ExchangeMismatchError,
    GroupFailure,
    LateWorkerError,
    WorkerLostError,
)
from tfdist.transport.nonblocking_connection import NonblockingConnection
from tfdist.transport.transport_errors import ConnectionClosedError
from tfdist.utils.active_clock import ActiveClock

_BEAT_SECONDS = 1.0
_LATE_SECONDS = 0.1  # a thread that is not stopped wakes up earlier after a wait
_LAST_VALUES_SECONDS = 2.0  # how long values of others may arrive after a worker has left


class GroupControl:
    """Keeps an authenticated connection to each other worker, in one thread.

    Every worker learns of a failure from the worker that noticed it and from the lost worker's closed connection,
    so all raise the same error within a moment. A worker that is silent for `silence_seconds` counts as lost.
    `close` closes the connections, which are by rank.
    """

    def __init__(
        self, rank: int, connections: dict[int, NonblockingConnection], failure: GroupFailure, silence_seconds: float
    ) -> None:
        self._rank, self._failure, self._silence_seconds = rank, failure, silence_seconds
        self._connections = dict(connections)
        self._lowest = min([rank, *connections])
        # What arrived while this process was stopped is read before silence is judged. The others may have been stopped
        # as long, and send again only now: so a gap alone must not reach the limit.
        self._clock = ActiveClock(now=time.monotonic(), max_gap_seconds=silence_seconds / 2)
        self._active_seconds = 0.0
        self._heard = dict.fromkeys(connections, 0.0)
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._is_closed = False
        self._wakes = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        failure.tell = lambda error: self._send_to_all(_described(error))
        failure.tell_stalled = lambda channel, call: self._send_to_all(
            {"stalled": channel, "number": call.number, "call": str(call)}
        )
        self._thread = threading.Thread(target=self._serve, name="tfdist exchange control", daemon=True)
        self._thread.start()

    def publish(self, key: str, value: str, *, only_for: int | None = None) -> None:
        """Gives all workers, or one of them, a value under a key, in place of an earlier one."""
        if only_for in (None, self._rank):
            self._set(key, value)
        connections = self._connections if only_for is None else {only_for: self._connections.get(only_for)}
        self._send(connections, {"key": key, "value": value})

    def propose(self, key: str, value: str) -> str:
        """Gives all workers the value of the first worker that proposes one under a key; returns that value.

        The worker of the lowest rank decides which proposal is the first.
        """
        if self._rank == self._lowest:
            self._take_first(key, value)
        else:
            lowest = {self._lowest: self._connections.get(self._lowest)}
            self._send(lowest, {"propose": key, "value": value})
        return str(self.wait_for(key))

    def withdraw(self, key: str) -> None:
        with self._changed:
            self._values.pop(key, None)
        self._send_to_all({"key": key})

    def take(self, key: str) -> str:
        """Waits for the value under a key, and removes it on this worker."""
        value = str(self.wait_for(key))
        with self._changed:
            self._values.pop(key, None)
        return value

    def wait_for(self, key: str, timeout_seconds: float | None = None) -> str | None:
        """Returns the value under a key, once a worker has published it; `None` after `timeout_seconds`.

        An ExchangeError: a worker is lost, or has left and will publish nothing more.
        """
        failure, began = self._failure, time.monotonic()

        def ends() -> Any:
            return key in self._values or failure.error or failure.left

        with self._changed:
            if not self._changed.wait_for(ends, timeout_seconds):
                # If this process was stopped meanwhile, what has arrived is not read yet.
                has_been_stopped = time.monotonic() - began > (timeout_seconds or 0) + _LATE_SECONDS
                self._changed.wait_for(ends, _BEAT_SECONDS if has_been_stopped else 0)
            if failure.left and not failure.error:  # values of other workers may still arrive
                self._changed.wait_for(lambda: key in self._values or failure.error, _LAST_VALUES_SECONDS)
            if key in self._values:
                return self._values[key]
            failure.check()
            if failure.left:
                raise WorkerLostError(min(failure.left), HAS_LEFT, f"a wait for {key!r}")
        return None

    def close(self, *, has_ended: bool = True) -> None:
        """Closes all connections; tells the others before that this worker leaves, if it `has_ended` its training."""
        if self._is_closed:
            return
        self._is_closed = True
        # After an uncaught exception the others see a lost worker.
        if has_ended and getattr(sys, "last_value", None) is None:
            self._send_to_all({"left": True})
        os.eventfd_write(self._wakes, 1)
        self._thread.join(timeout=2 * _BEAT_SECONDS)
        for connection in self._connections.values():
            connection.close()
        os.close(self._wakes)

    def close_in_fork(self) -> None:
        """Closes the connections in a forked child, where nothing else runs, and without a word to the others."""
        for connection in self._connections.values():
            connection.close_in_fork()

    def _serve(self) -> None:
        next_beat = 0.0
        while not self._is_closed:
            now = time.monotonic()
            if now >= next_beat:
                next_beat = now + _BEAT_SECONDS
                self._send_to_all({"alive": True})
            poller = select.poll()
            poller.register(self._wakes, select.POLLIN)
            for connection in self._connections.values():
                poller.register(connection.fileno(), select.POLLIN)
            if self._failure.error is None:
                poller.register(self._failure.descriptor, select.POLLIN)
            poller.poll(max(next_beat - time.monotonic(), 0) * 1000)
            self._active_seconds = self._clock.advance(time.monotonic())
            self._receive()
            self._check_silence()  # after what has arrived while this process was stopped
            if self._failure.error is not None:
                with self._changed:
                    self._changed.notify_all()

    def _receive(self) -> None:
        for rank, connection in list(self._connections.items()):
            try:
                for message in connection.receive():
                    self._heard[rank] = self._active_seconds
                    self._take(rank, message)
            except ConnectionClosedError as error:
                self._drop(rank, str(error))
            except (AttributeError, KeyError, TypeError, ValueError):
                self._failure.lost(rank, NO_MESSAGE)
                self._drop(rank, NO_MESSAGE)

    def _take(self, rank: int, message: dict[str, Any]) -> None:
        if "left" in message:
            with self._changed:
                self._failure.left.add(rank)
                self._changed.notify_all()
        elif "propose" in message:
            self._take_first(str(message["propose"]), str(message["value"]))
        elif "lost" in message:
            self._failure.lost(int(message["lost"]), str(message["cause"]))
        elif "late" in message:
            self._failure.late([int(worker) for worker in message["late"]], message["seconds"], str(message["call"]))
        elif "stalled" in message:
            number, call = int(message["number"]), str(message["call"])
            self._failure.stalls_elsewhere(self._rank, rank, str(message["stalled"]), number, call)
        elif "calls" in message:
            self._failure.mismatch({int(worker): str(call) for worker, call in message["calls"].items()})
        elif "value" in message:
            self._set(str(message["key"]), str(message["value"]))
        elif "key" in message:
            with self._changed:
                self._values.pop(str(message["key"]), None)

    def _drop(self, rank: int, cause: str) -> None:
        with self._sending:
            self._connections.pop(rank).close()
        if rank not in self._failure.left:
            # The text is the only sign of why a connection closed.
            is_end = "closed" in cause or "reset" in cause.lower()
            self._failure.lost(rank, "its process has ended" if is_end else f"its connection broke ({cause})")

    def _check_silence(self) -> None:
        for rank in list(self._connections):
            silence = self._active_seconds - self._heard[rank]
            if silence > self._silence_seconds:
                self._failure.lost(rank, f"it has not answered for {silence:.0f} s: it is frozen, or its link is cut")

    def _send_to_all(self, message: dict[str, Any]) -> None:
        self._send(self._connections, message)

    def _send(self, connections: Mapping[int, NonblockingConnection | None], message: dict[str, Any]) -> None:
        with self._sending:
            for connection in connections.values():
                if connection is not None:
                    with contextlib.suppress(ConnectionClosedError):
                        connection.send(message)  # `_receive` sees it, too, after the last messages of that worker

    def _take_first(self, key: str, value: str) -> None:
        with self._changed:
            is_first = key not in self._values
            value = self._values.setdefault(key, value)
            self._changed.notify_all()
        if is_first:
            self._send_to_all({"key": key, "value": value})

    def _set(self, key: str, value: str) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()


def _described(error: ExchangeError) -> dict[str, Any]:
    if isinstance(error, WorkerLostError):
        return {"lost": error.rank, "cause": error.cause}
    if isinstance(error, LateWorkerError):
        return {"late": error.ranks, "seconds": error.seconds, "call": error.call}
    assert isinstance(error, ExchangeMismatchError)
    return {"calls": {str(rank): call for rank, call in error.calls.items()}}
