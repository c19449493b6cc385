"""Connects the workers of a training for its whole life, and keeps their agreement about who trains."""

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfdist.exchange.group_listener import Encryption, GroupListener
from tfdist.membership.agreement import Agreement
from tfdist.membership.decisions import NO_VIEW, View
from tfdist.membership.meeting import Meeting, new_number
from tfdist.membership.membership_errors import ExcludedWorkerError, JoinError, NoMajorityError
from tfdist.transport.handshake import Credentials
from tfdist.transport.nonblocking_connection import NonblockingConnection
from tfdist.transport.transport_errors import ConnectionClosedError
from tfdist.utils.active_clock import ActiveClock

_BEATS_PER_SILENCE = 8
_LONGEST_BEAT_SECONDS = 1.0
_TICK_SECONDS = 0.02  # while the workers agree on another view
_PATIENCE_SECONDS = 5.0  # of a worker that joins and hears nobody


class Membership:
    """A connection to each other worker, and one thread, which answers also while this worker computes.

    Workers have numbers: those that begin together their ranks, those that join later larger ones, whose remainder by
    the number of ranks is their rank.

    Args:
        rank: The rank of this worker.
        addresses: `host:port` of each worker, by rank.
        listener: What listens on the address of this worker.
        credentials: What the workers prove to each other.
        offer: What a worker that joins gets to know, as JSON.
        timeout_seconds: How long the others may take to start.
        silence_seconds: The time after which a worker that says nothing counts as lost.
        majority_seconds: How long workers that are too few to go on wait for others.
        encryption: Encrypts connections between hosts, if given.

    Attributes:
        number: The number of this worker.
        has_joined_late: Whether the others trained already when this worker started.
        offered: What a worker that trains has told this one, which joins.

    Raises:
        TimeoutError, OSError, HandshakeError: See `tfdist.exchange.worker_exchange.Exchange`.
    """

    def __init__(
        self,
        rank: int,
        addresses: Sequence[str],
        listener: GroupListener,
        credentials: Credentials,
        *,
        offer: Callable[[], Mapping[str, Any]] = dict,
        timeout_seconds: float = 300.0,
        silence_seconds: float = 60.0,
        majority_seconds: float = 10.0,
        encryption: Encryption | None = None,
    ) -> None:
        self.rank, self._ranks = rank, len(addresses)
        self._silence_seconds, self._majority_seconds = silence_seconds, majority_seconds
        self._agreement: Agreement | None = None
        self._connections: dict[int, NonblockingConnection] = {}
        self._heard: dict[int, float] = {}
        self._trained: set[int] = set()  # workers that trained when this one joined
        self.offered: Mapping[str, Any] = {}
        self._active_seconds = 0.0
        self._clock = ActiveClock(now=time.monotonic(), max_gap_seconds=silence_seconds / 2)
        self._beat_seconds = min(silence_seconds / _BEATS_PER_SILENCE, _LONGEST_BEAT_SECONDS)
        self._changed = threading.Condition(threading.RLock())
        self._on_change: Callable[[], None] = lambda: None
        self._was_changing = self._is_closed = False
        self._wakes = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._meeting = Meeting(
            rank,
            addresses,
            listener,
            credentials,
            encryption=encryption,
            trains=lambda: self.is_member,
            has_lost=self._has_lost,
            offer=offer,
            take=self._take,
        )
        connections = self._meeting.begin(timeout_seconds)
        self.has_joined_late = connections is None
        self.number = rank if connections is not None else new_number(rank, self._ranks)
        view = NO_VIEW if connections is None else View((1, 0), tuple(range(self._ranks)))
        with self._changed:
            self._agreement = Agreement(self.number, view, self._send, ranks=self._ranks)
            for number, connection in (connections or {}).items():
                self._take(number, connection, {})
        self._thread = threading.Thread(target=self._serve, name="tfdist membership", daemon=True)
        self._thread.start()
        if connections is not None:
            self._meeting.accept(self.number)
        else:
            self._meeting.join(self.number)
            with self._changed:
                if not self._changed.wait_for(lambda: bool(self.offered), timeout_seconds):
                    raise JoinError(f"no worker that trains has answered in {timeout_seconds:g} s")

    @property
    def view(self) -> View:
        """The workers that train together, as the last change has left them."""
        return self._agreed.view

    @property
    def is_member(self) -> bool:
        """Whether this worker trains with others."""
        return self._agreement is not None and self._agreement.view != NO_VIEW

    @property
    def committed_steps(self) -> int:
        """The number of steps that this worker has committed."""
        return self._agreed.committed

    @property
    def donors(self) -> list[int]:
        """The ranks of the workers that have the state of the training, the oldest first, for one that joins."""
        with self._changed:
            return [number % self._ranks for number in sorted(self._trained) if number in self._connections]

    def ranks(self, view: View) -> list[int]:
        """Returns the ranks of the members of a view."""
        return sorted(number % self._ranks for number in view.members)

    def interrupt_by(self, function: Callable[[], None]) -> None:
        """Calls `function`, on another thread, when the present view ends: exchanges in it would wait in vain."""
        with self._changed:
            self._on_change = function
            if self._agreed.is_changing:
                function()

    def commit(self) -> bool:
        """Says that this worker has all sums of its step; returns whether all have them.

        Returns:
            True: the step counts on all workers that go on. False: its writes must be taken back, and it is computed
            again in the next view, as a worker was lost before all had the sums.

        Raises:
            ExcludedWorkerError, NoMajorityError: See `wait_for_view`.
        """
        agreement = self._agreed
        with self._changed:
            before, step = agreement.view, agreement.committed + 1
            agreement.has_sums()
            self._note_change()
            self._wait_until(lambda: agreement.committed >= step or agreement.view != before)
            return agreement.committed >= step

    def has_replayed(self, step: int, *, is_ready: bool) -> None:
        """This worker, which joins, has the state after a step; `is_ready` says that it may be taken in."""
        with self._changed:
            self._agreed.joins_with(step)
            if is_ready:
                for number in list(self._connections):
                    self._send(number, {"joins": step})
            self._note_change()

    def wait_to_join(self, is_over: Callable[[], bool], timeout_seconds: float | None = None) -> bool:
        """Waits until this worker, which joins, is a member, or `is_over`; returns whether that is so in time.

        Raises:
            JoinError: No worker that trains is left.
        """
        limit = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        alone_since: float | None = None
        with self._changed:
            while not (is_over() or self.is_member):
                now = time.monotonic()
                alone_since = None if self.donors else alone_since or now
                if alone_since is not None and now > alone_since + _PATIENCE_SECONDS:
                    raise JoinError("the workers that trained have ended")
                if limit is not None and now > limit:
                    return False
                self._changed.wait(self._beat_seconds)
        return True

    def notify(self) -> None:
        """Makes `wait_to_join` look again."""
        with self._changed:
            self._changed.notify_all()

    def wait_for_view(self) -> View:
        """Waits until the workers agree on who trains; returns the view.

        Raises:
            ExcludedWorkerError: The others go on without this worker, which they have not heard.
            NoMajorityError: This worker and those that it hears are too few: others may go on without them.
        """
        with self._changed:
            self._wait_until(lambda: not self._agreed.is_changing)
            return self._agreed.view

    def report_failure(self, view: View, rank: int, patience_seconds: float = 1.0) -> None:
        """An exchange with a worker has failed in a view: waits until the membership notices why.

        If it does not, the worker counts as silent: it is there, and its exchange is broken.
        """
        agreement = self._agreed
        with self._changed:
            if not self._changed.wait_for(lambda: agreement.is_changing or agreement.view != view, patience_seconds):
                for number in view.members:
                    if number % self._ranks == rank and number != self.number:
                        agreement.does_not_hear(number)
                self._note_change()

    def close(self) -> None:
        """Leaves: for the others this worker has ended."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
        self._meeting.close()
        os.eventfd_write(self._wakes, 1)
        self._thread.join()
        for connection in self._connections.values():
            connection.close()
        os.close(self._wakes)

    def close_in_fork(self) -> None:
        """Closes the connections in a forked child; they stay open in the parent."""
        for connection in list(self._connections.values()):
            connection.close_in_fork()

    @property
    def _agreed(self) -> Agreement:
        assert self._agreement is not None
        return self._agreement

    def _has_lost(self, rank: int) -> bool:
        with self._changed:
            members = [number for number in self.view.members if number in self._connections] if self.is_member else []
            return self.is_member and rank not in [number % self._ranks for number in members]

    def _take(self, number: int, connection: NonblockingConnection, answer: Mapping[str, Any]) -> None:
        """Takes a connection to another worker."""
        with self._changed:
            if self._is_closed or self._agreement is None or number in self._connections:
                connection.close()
                return
            self._connections[number], self._heard[number] = connection, self._active_seconds
            self._agreement.connects(number)
            if answer.get("trains"):
                self._trained.add(number)
                self.offered = {"": None, **dict(answer.get("offer", {}))}
            self._changed.notify_all()
            os.eventfd_write(self._wakes, 1)

    def _wait_until(self, is_over: Callable[[], bool]) -> None:
        limit: float | None = None
        while not is_over():
            if self._agreed.is_excluded:
                raise ExcludedWorkerError(self.rank)
            obstacle = self._agreed.obstacle
            if obstacle is None:
                limit = None
            elif limit is None:
                limit = time.monotonic() + self._majority_seconds
            elif time.monotonic() > limit:
                raise NoMajorityError(obstacle, self._majority_seconds, self._ranks)
            self._changed.wait(self._beat_seconds)

    def _serve(self) -> None:
        next_beat = 0.0
        while not self._is_closed:
            now = time.monotonic()
            if now >= next_beat:
                next_beat = now + self._beat_seconds
                with self._changed:
                    for number in list(self._connections):
                        self._send(number, {"alive": True})
            poller = select.poll()
            poller.register(self._wakes, select.POLLIN)
            for connection in list(self._connections.values()):
                poller.register(connection.fileno(), select.POLLIN | (select.POLLOUT if connection.has_unsent else 0))
            wait_seconds = _TICK_SECONDS if self._agreed.is_changing else next_beat - time.monotonic()
            poller.poll(max(wait_seconds, 0) * 1000)
            with self._changed:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wakes)
                self._active_seconds = self._clock.advance(time.monotonic())
                self._receive()
                self._check_silence()
                self._agreed.tick(time.monotonic())
                self._note_change()
                self._changed.notify_all()

    def _note_change(self) -> None:
        """Interrupts exchanges when a view ends; wakes the thread, which drives the agreement."""
        is_changing = self._agreed.is_changing
        if is_changing and not self._was_changing:
            self._on_change()
            os.eventfd_write(self._wakes, 1)
        self._was_changing = is_changing

    def _receive(self) -> None:
        for number, connection in list(self._connections.items()):
            try:
                connection.flush()
                for message in connection.receive():
                    self._heard[number] = self._active_seconds
                    self._agreed.hears(number)
                    if "alive" not in message:
                        self._agreed.receive(number, message, time.monotonic())
            except (ConnectionClosedError, AttributeError, KeyError, TypeError, ValueError):
                self._connections.pop(number).close()
                self._agreed.has_ended(number)

    def _check_silence(self) -> None:
        for number in self._connections:
            if self._active_seconds - self._heard[number] > self._silence_seconds:
                self._agreed.does_not_hear(number)

    def _send(self, number: int, message: Mapping[str, Any]) -> None:
        connection = self._connections.get(number)
        if connection is not None:
            with contextlib.suppress(ConnectionClosedError):  # `_receive` sees it, too
                connection.send(message)
