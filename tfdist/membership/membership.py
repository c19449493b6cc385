"""Connects the workers of a training for its whole life, and keeps their agreement about who trains."""

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfdist.exchange.joining import Encryption, GroupJoin
from tfdist.membership.agreement import Agreement
from tfdist.membership.decisions import View
from tfdist.membership.membership_errors import ExcludedWorkerError, NoMajorityError
from tfdist.transport.handshake import Credentials
from tfdist.transport.nonblocking_connection import NonblockingConnection
from tfdist.transport.transport_errors import ConnectionClosedError
from tfdist.utils.active_clock import ActiveClock

PROTOCOL = 1
_BEATS_PER_SILENCE = 8
_LONGEST_BEAT_SECONDS = 1.0
_TICK_SECONDS = 0.02  # while the workers agree on another view


class Membership:
    """A connection to each other worker, and one thread, which answers also while this worker computes.

    Args:
        rank: The rank of this worker.
        addresses: `host:port` of each worker, by rank.
        token: A secret of all workers.
        cluster: A description that all workers of one attempt have in common.
        timeout_seconds: How long the others may take to start.
        silence_seconds: The time after which a worker that says nothing counts as lost.
        majority_seconds: How long workers that are too few to go on wait for others.
        encryption: Encrypts connections between hosts, if given.

    Raises:
        TimeoutError, OSError, HandshakeError: See `tfdist.exchange.worker_exchange.Exchange`.
    """

    def __init__(
        self,
        rank: int,
        addresses: Sequence[str],
        *,
        token: str,
        cluster: str = "",
        timeout_seconds: float = 300.0,
        silence_seconds: float = 60.0,
        majority_seconds: float = 10.0,
        encryption: Encryption | None = None,
    ) -> None:
        self.rank = rank
        self._silence_seconds, self._majority_seconds = silence_seconds, majority_seconds
        credentials = Credentials("tfdist membership", PROTOCOL, token, cluster=cluster, same_version=True)
        join = GroupJoin(rank, addresses, credentials, (), encryption=encryption, shares_memory=False)
        self._connections: dict[int, NonblockingConnection] = dict(join.join(timeout_seconds).control)
        self._agreement = Agreement(rank, View((1, 0), tuple(range(len(addresses)))), self._send)
        self._clock = ActiveClock(now=time.monotonic(), max_gap_seconds=silence_seconds / 2)
        self._heard = dict.fromkeys(self._connections, 0.0)
        self._beat_seconds = min(silence_seconds / _BEATS_PER_SILENCE, _LONGEST_BEAT_SECONDS)
        self._changed = threading.Condition(threading.RLock())
        self._on_change: Callable[[], None] = lambda: None
        self._was_changing = self._is_closed = False
        self._wakes = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._serve, name="tfdist membership", daemon=True)
        self._thread.start()

    @property
    def view(self) -> View:
        """The workers that train together, as the last change has left them."""
        return self._agreement.view

    @property
    def committed_steps(self) -> int:
        """The number of steps that this worker has committed."""
        return self._agreement.committed

    def interrupt_by(self, function: Callable[[], None]) -> None:
        """Calls `function`, on another thread, when the present view ends: exchanges in it would wait in vain."""
        with self._changed:
            self._on_change = function
            if self._agreement.is_changing:
                function()

    def commit(self) -> bool:
        """Says that this worker has all sums of its step; returns whether all have them.

        Returns:
            True: the step counts on all workers that go on. False: its writes must be taken back, and it is computed
            again in the next view, as a worker was lost before all had the sums.

        Raises:
            ExcludedWorkerError, NoMajorityError: See `wait_for_view`.
        """
        agreement = self._agreement
        with self._changed:
            before, step = agreement.view, agreement.committed + 1
            agreement.has_sums()
            self._note_change()
            self._wait_until(lambda: agreement.committed >= step or agreement.view != before)
            return agreement.committed >= step

    def wait_for_view(self) -> View:
        """Waits until the workers agree on who trains; returns the view.

        Raises:
            ExcludedWorkerError: The others go on without this worker, which they have not heard.
            NoMajorityError: This worker and those that it hears are too few: others may go on without them.
        """
        with self._changed:
            self._wait_until(lambda: not self._agreement.is_changing)
            return self._agreement.view

    def report_failure(self, view: View, rank: int, patience_seconds: float = 1.0) -> None:
        """An exchange with a worker has failed in a view: waits until the membership notices why.

        If it does not, the worker counts as silent: it is there, and its exchange is broken.
        """
        agreement = self._agreement
        with self._changed:
            if not self._changed.wait_for(lambda: agreement.is_changing or agreement.view != view, patience_seconds):
                agreement.does_not_hear(rank)
                self._note_change()

    def close(self) -> None:
        """Leaves: for the others this worker has ended."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
        os.eventfd_write(self._wakes, 1)
        self._thread.join()
        for connection in self._connections.values():
            connection.close()
        os.close(self._wakes)

    def _wait_until(self, is_over: Callable[[], bool]) -> None:
        limit: float | None = None
        while not is_over():
            if self._agreement.is_excluded:
                raise ExcludedWorkerError(self.rank)
            obstacle = self._agreement.obstacle
            if obstacle is None:
                limit = None
            elif limit is None:
                limit = time.monotonic() + self._majority_seconds
            elif time.monotonic() > limit:
                raise NoMajorityError(obstacle, self._majority_seconds)
            self._changed.wait(self._beat_seconds)

    def _serve(self) -> None:
        next_beat = 0.0
        while not self._is_closed:
            now = time.monotonic()
            if now >= next_beat:
                next_beat = now + self._beat_seconds
                with self._changed:
                    for rank in list(self._connections):
                        self._send(rank, {"alive": True})
            poller = select.poll()
            poller.register(self._wakes, select.POLLIN)
            for connection in self._connections.values():
                poller.register(connection.fileno(), select.POLLIN | (select.POLLOUT if connection.has_unsent else 0))
            wait_seconds = _TICK_SECONDS if self._agreement.is_changing else next_beat - time.monotonic()
            poller.poll(max(wait_seconds, 0) * 1000)
            with self._changed:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wakes)
                active_seconds = self._clock.advance(time.monotonic())
                self._receive(active_seconds)
                self._check_silence(active_seconds)
                self._agreement.tick(time.monotonic())
                self._note_change()
                self._changed.notify_all()

    def _note_change(self) -> None:
        """Interrupts exchanges when a view ends; wakes the thread, which drives the agreement."""
        is_changing = self._agreement.is_changing
        if is_changing and not self._was_changing:
            self._on_change()
            os.eventfd_write(self._wakes, 1)
        self._was_changing = is_changing

    def _receive(self, active_seconds: float) -> None:
        for rank, connection in list(self._connections.items()):
            try:
                connection.flush()
                for message in connection.receive():
                    self._heard[rank] = active_seconds
                    self._agreement.hears(rank)
                    if "alive" not in message:
                        self._agreement.receive(rank, message, time.monotonic())
            except (ConnectionClosedError, AttributeError, KeyError, TypeError, ValueError):
                self._connections.pop(rank).close()
                self._agreement.has_ended(rank)

    def _check_silence(self, active_seconds: float) -> None:
        for rank in self._connections:
            if active_seconds - self._heard[rank] > self._silence_seconds:
                self._agreement.does_not_hear(rank)

    def _send(self, rank: int, message: Mapping[str, Any]) -> None:
        connection = self._connections.get(rank)
        if connection is not None:
            with contextlib.suppress(ConnectionClosedError):  # `_receive` sees it, too
                connection.send(message)
