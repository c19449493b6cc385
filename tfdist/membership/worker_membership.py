"""Connects the workers of a training for its whole life, and keeps their agreement about who trains."""

import contextlib
import errno
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfdist.exchange.group_listener import Encryption, GroupListener
from tfdist.membership.agreement import Agreement
from tfdist.membership.commit_requests import Answer, CommitRequests, Waiting, answer_of
from tfdist.membership.decisions import NO_VIEW, View
from tfdist.membership.meeting import Meeting, new_number
from tfdist.membership.membership_errors import (
    ExcludedWorkerError,
    JoinError,
    LeftWorkersError,
    NoMajorityError,
)
from tfdist.transport.handshake import Credentials
from tfdist.transport.nonblocking_connection import NonblockingConnection
from tfdist.transport.transport_errors import ConnectionClosedError
from tfdist.utils.active_clock import ActiveClock

_log = logging.getLogger("tfdist")
_BEATS_PER_SILENCE = 8
_LONGEST_BEAT_SECONDS = 1.0
_LEAST_ANSWER_SECONDS = 2.0
_TICK_SECONDS = 0.02  # while the workers agree on another view
_PATIENCE_SECONDS = 5.0  # of a worker that joins and reaches nobody
_MOST_REFUSALS = 20  # of a worker that joins; some are ordinary, as when it is a step too late
_ENDS = ("the connection was closed", os.strerror(errno.ECONNRESET), os.strerror(errno.EPIPE))
"""What the kernel says of a connection whose other process has ended. Other errors do not prove that."""


class Membership:
    """A connection to each other worker, and one thread, which answers also while this worker computes.

    Workers have numbers: those that begin together their ranks, those that join later larger ones, whose remainder by
    the number of ranks is their rank.

    Args:
        rank: The rank of this worker.
        addresses: `host:port` of each worker, by rank.
        listener: What listens on the address of this worker.
        credentials: What the workers prove to each other.
        beginning: How many workers begin together, those of the lowest ranks; `None`: all.
        offer: What a worker that joins gets to know, as JSON.
        timeout_seconds: How long the others may take to start.
        silence_seconds: The time after which a worker that says nothing counts as lost.
        majority_seconds: How long workers that are too few to continue wait for others.
        encryption: Encrypts connections between hosts, if given.

    Attributes:
        number: The number of this worker.
        has_joined_late: Whether the others trained already when this worker started.
        offered: What this worker, which joins, has received from one that trains.

    Raises:
        TimeoutError, OSError, HandshakeError: See `tfdist.exchange.worker_exchange.Exchange`.
        JoinError: The others trained, and do not answer.
    """

    def __init__(
        self,
        rank: int,
        addresses: Sequence[str],
        listener: GroupListener,
        credentials: Credentials,
        *,
        beginning: int | None = None,
        offer: Callable[[], Mapping[str, Any]] = dict,
        timeout_seconds: float = 300.0,
        silence_seconds: float = 60.0,
        majority_seconds: float = 10.0,
        encryption: Encryption | None = None,
    ) -> None:
        self.rank, self._ranks = rank, len(addresses)
        self._beginning = self._ranks if beginning is None else beginning
        self._silence_seconds, self._majority_seconds = silence_seconds, majority_seconds
        self._agreement: Agreement | None = None
        self._connections: dict[int, NonblockingConnection] = {}
        # Of younger workers, which have not said yet that they have the answer to their request: until then they may
        # close a connection, and open another one.
        self._unconfirmed: list[tuple[int, NonblockingConnection, Mapping[str, Any]]] = []
        # Whose messages mean nothing. They stay open: a connection that closes is the proof that a process has ended.
        self._broken: list[NonblockingConnection] = []
        self._heard: dict[int, float] = {}
        self._trained: set[int] = set()  # workers that trained when this one joined
        self.offered: Mapping[str, Any] = {}
        self._active_seconds = 0.0
        self._clock = ActiveClock(now=time.monotonic(), max_gap_seconds=silence_seconds / 2)
        self._beat_seconds = min(silence_seconds / _BEATS_PER_SILENCE, _LONGEST_BEAT_SECONDS)
        self._changed = threading.Condition(threading.RLock())
        self._on_change: Callable[[], None] = lambda: None
        self._followed = NO_VIEW  # the view in which this worker exchanges
        self._was_over = self._is_closed = False
        self._failure: BaseException | None = None
        self._commits = CommitRequests(self._waiting)
        self._thread: threading.Thread | None = None
        self._wakes = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._meeting = Meeting(
            rank,
            addresses,
            self._beginning,
            listener,
            credentials,
            encryption=encryption,
            trains=lambda: self.is_member,
            newest_if_lost=self._newest_if_lost,
            is_connected=self._is_connected,
            offer=offer,
            take=self._take,
        )
        try:
            self._start(timeout_seconds)
        except BaseException:
            self.close()
            raise

    def _start(self, timeout_seconds: float) -> None:
        connections = self._meeting.begin(timeout_seconds)
        self.has_joined_late = connections is None
        newest = self._meeting.newest
        self.number = self.rank if connections is not None else new_number(self.rank, self._ranks, newest)
        self._followed = NO_VIEW if connections is None else View((1, 0), tuple(range(self._beginning)))
        answer_seconds = max(_LEAST_ANSWER_SECONDS, self._silence_seconds / 2)
        with self._changed:
            self._agreement = Agreement(
                self.number, self._followed, self._send, ranks=self._ranks, answer_seconds=answer_seconds
            )
            for number, connection in (connections or {}).items():
                self._add(number, connection, {})
        self._thread = threading.Thread(target=self._serve, name="tfdist membership", daemon=True)
        self._thread.start()
        if connections is not None:
            self._meeting.accept(self.number)
            return
        self._meeting.join(self.number)
        seconds = min(timeout_seconds, max(self._silence_seconds, _PATIENCE_SECONDS))
        with self._changed:
            if not self._changed.wait_for(lambda: bool(self.offered), seconds):
                raise JoinError(f"no worker that trains has answered in {seconds:g} s")

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
            heard = [number for number in sorted(self._trained) if self._agreed.is_reached(number)]
            return [number % self._ranks for number in heard]

    def ranks(self, view: View) -> list[int]:
        """Returns the ranks of the members of a view."""
        return sorted(number % self._ranks for number in view.members)

    @property
    def leaving(self) -> frozenset[int]:
        """The members that leave after the last step, with this worker or without; see `Agreement.leaving`."""
        return self._agreed.leaving

    def leave_after_step(self) -> None:
        """Says with the next step that this worker leaves after it. A handler of signals may call this."""
        self._agreed.leaves = True

    def reaches(self, number: int) -> bool:
        """Returns whether a worker has neither ended nor is silent."""
        with self._changed:
            return number == self.number or self._agreed.is_reached(number)

    def is_in(self, view: View) -> bool:
        """Returns whether a view is the present one, and no other follows."""
        with self._changed:
            return self._agreed.view == view and not self._is_over()

    def interrupt_by(self, function: Callable[[], None]) -> None:
        """Calls `function`, on another thread, when the present view ends: exchanges in it would only wait."""
        with self._changed:
            self._on_change = function
            self._was_over = self._is_over()
            if self._was_over:
                function()

    def commit(self, view: View) -> bool:
        """Says that this worker has all sums of its step, computed in `view`; returns whether all have them.

        Returns:
            True: the step counts on all workers that continue. False: its writes must be taken back, and it is computed
            again in the next view, as a worker was lost before all had the sums.

        Raises:
            ExcludedWorkerError, NoMajorityError, LeftWorkersError: See `wait_for_view`.
        """
        return answer_of(lambda answer: self.commit_then(view, answer))

    def commit_then(self, view: View, answer: Answer) -> None:
        """Like `commit`, but returns at once: `answer` gets what that returns or raises, here or on another thread."""
        with self._changed:
            self._commits.ask(self._agreed, view, answer)
            self._note_change()

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
            JoinError: No worker that trains is left, or they do not take in this one.
            LeftWorkersError: See `wait_for_view`.
        """
        limit = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        alone_since: float | None = None
        with self._changed:
            while not (is_over() or self.is_member):
                self._check_usable()
                if self._agreed.refusals >= _MOST_REFUSALS:
                    raise JoinError("the others do not take it in, as one of them has no connection to it")
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
            ExcludedWorkerError: The others continue without this worker, which they did not reach.
            NoMajorityError: This worker and those that it reaches are too few: others may continue alone.
            LeftWorkersError: `close` was called, or the connections have failed.
        """
        agreement = self._agreed
        with self._changed:
            self._check_usable()
            self._wait_until(lambda: not (agreement.is_changing or agreement.is_excluded))
            self._followed = agreement.view
            return agreement.view

    def report_failure(self, view: View, rank: int, patience_seconds: float = 1.0) -> None:
        """An exchange with a worker has failed in a view: waits until the membership notices why.

        If it does not, the worker counts as silent: it is there, and its exchange is broken. If it is reached again,
        or it is this one, or no member of the view, all begin another view together.
        """
        agreement = self._agreed

        def is_noticed() -> bool:
            has_ended = self._is_closed or self._failure is not None or agreement.is_excluded
            return has_ended or agreement.is_changing or agreement.view != view

        with self._changed:
            if not self._changed.wait_for(is_noticed, patience_seconds):
                for number in view.members:
                    if number % self._ranks == rank and number != self.number:
                        agreement.does_not_reach(number)
                agreement.exchange_fails()
                self._note_change()

    def close(self) -> None:
        """Leaves: for the others this worker has ended. A thread that waits, here or in an exchange, gets an error."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            os.eventfd_write(self._wakes, 1)
            self._commits.answer_if_known()
            self._changed.notify_all()
            self._on_change()
        self._meeting.close()
        if self._thread is not None:
            self._thread.join()
        with self._changed:
            self._close_connections()
            os.close(self._wakes)

    def close_in_fork(self) -> None:
        """Closes the connections in a forked child; they stay open in the parent."""
        for connection in self._all_connections():
            connection.close_in_fork()

    def _all_connections(self) -> list[NonblockingConnection]:
        unconfirmed = [connection for _, connection, _ in self._unconfirmed]
        return [*self._connections.values(), *unconfirmed, *self._broken]

    def _close_connections(self) -> None:
        for connection in self._all_connections():
            connection.close()

    @property
    def _agreed(self) -> Agreement:
        assert self._agreement is not None
        return self._agreement

    def _is_over(self) -> bool:
        """Whether exchanges in the view that this worker follows would only wait."""
        agreement, has_ended = self._agreed, self._is_closed or self._failure is not None
        return has_ended or agreement.is_changing or agreement.is_excluded or agreement.view != self._followed

    def _is_connected(self, rank: int) -> bool:
        return any(number % self._ranks == rank for number in [*self._connections])

    def _newest_if_lost(self, rank: int) -> int | None:
        """Returns the largest number that is known, if this worker trains without any worker of a rank."""
        with self._changed:
            if not self.is_member:
                return None
            members = [number for number in self.view.members if number in self._connections]
            if rank in [number % self._ranks for number in members]:
                return None
            return max([self.number, *self.view.members, *self._connections])

    def _take(
        self, number: int, connection: NonblockingConnection, message: Mapping[str, Any], *, is_dialed: bool
    ) -> None:
        """Takes a connection to another worker, which says of itself what `message` has."""
        with self._changed:
            if self._is_closed or self._failure is not None or self._agreement is None:
                connection.close()
            elif not is_dialed:
                self._unconfirmed.append((number, connection, message))
            elif number in self._connections:
                connection.close()  # that worker has got nothing on it
            else:
                self._add(number, connection, message)
                self._send(number, {"alive": True})  # confirms it
            self._wake()

    def _add(self, number: int, connection: NonblockingConnection, message: Mapping[str, Any]) -> None:
        self._connections[number], self._heard[number] = connection, self._active_seconds
        self._agreed.connects(number)
        if message.get("trains"):
            self._trained.add(number)
            self.offered = {"": None, **dict(message.get("offer", {}))}
        self._changed.notify_all()

    def _wake(self) -> None:
        if not self._is_closed:
            os.eventfd_write(self._wakes, 1)

    def _check_usable(self) -> None:
        if self._is_closed:
            raise LeftWorkersError("the end of its program, which has closed its connections")
        if self._failure is not None:
            raise LeftWorkersError(f"the failure of its connections ({self._failure!r})") from self._failure
        if self._agreed.is_excluded:
            raise ExcludedWorkerError(self.rank)

    def _wait_until(self, is_over: Callable[[], bool]) -> None:
        for _ in self._waiting(is_over):
            self._changed.wait(self._beat_seconds)

    def _waiting(self, is_over: Callable[[], bool]) -> Waiting:
        """Yields until something is over; raises an error if that cannot come any more."""
        limit: float | None = None
        while not is_over():
            self._check_usable()
            obstacle = self._agreed.obstacle
            if obstacle is None:
                limit = None
            elif limit is None:
                limit = time.monotonic() + self._majority_seconds
            elif time.monotonic() > limit:
                raise NoMajorityError(obstacle, self._majority_seconds, self._ranks)
            yield

    def _serve(self) -> None:
        try:
            self._serve_until_closed()
        except BaseException as error:
            # The main thread raises it. For the others this worker has ended: it never commits anything again.
            with self._changed:
                self._failure = error
                self._close_connections()
                self._commits.answer_if_known()
                self._changed.notify_all()
            raise

    def _serve_until_closed(self) -> None:
        next_beat = 0.0
        while not self._is_closed:
            now = time.monotonic()
            poller = select.poll()
            poller.register(self._wakes, select.POLLIN)
            with self._changed:
                if now >= next_beat:
                    next_beat = now + self._beat_seconds
                    for number in self._connections:
                        self._send(number, {"alive": True})
                for _, connection, _ in self._unconfirmed:
                    poller.register(connection.fileno(), select.POLLIN)
                for connection in self._connections.values():
                    poller.register(connection.fileno(), select.POLLIN | select.POLLOUT * connection.has_unsent)
            wait_seconds = _TICK_SECONDS if self._agreed.is_changing else next_beat - time.monotonic()
            poller.poll(max(wait_seconds, 0) * 1000)
            with self._changed:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wakes)
                self._active_seconds = self._clock.advance(time.monotonic())
                self._receive_first()
                self._receive()
                self._check_silence()
                self._agreed.tick(time.monotonic())
                self._note_change()
                self._commits.answer_if_known()
                self._changed.notify_all()

    def _note_change(self) -> None:
        """Interrupts exchanges when a view ends; wakes the thread, which drives the agreement."""
        is_over = self._is_over()
        if is_over and not self._was_over:
            self._on_change()
            self._wake()
        self._was_over = is_over

    def _receive_first(self) -> None:
        """Takes in the workers that say that they have the answer to their request."""
        waiting, self._unconfirmed = self._unconfirmed, []
        for number, connection, message in waiting:
            try:
                has_confirmed = next(connection.receive(), None) is not None
            except ConnectionClosedError:  # it opens another one, or has another one
                connection.close()
                continue
            if not has_confirmed:
                self._unconfirmed.append((number, connection, message))
            elif number in self._connections:
                self._broken.append(connection)
            else:
                self._add(number, connection, message)

    def _receive(self) -> None:
        for number, connection in list(self._connections.items()):
            try:
                connection.flush()
                for message in connection.receive():
                    self._heard[number] = self._active_seconds
                    self._agreed.reaches(number)
                    if "alive" not in message:
                        self._agreed.receive(number, message, time.monotonic())
            except ConnectionClosedError as error:
                self._connections.pop(number)
                if str(error) in _ENDS:
                    connection.close()
                    self._agreed.has_ended(number)
                else:
                    self._lose(number, connection, error)
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                self._connections.pop(number)
                self._lose(number, connection, error)
            self._commits.answer_if_known()  # before anything else, since a short step waits for it

    def _lose(self, number: int, connection: NonblockingConnection, error: Exception) -> None:
        _log.warning("The connection of worker %d to worker %d has failed: %r.", self.rank, number % self._ranks, error)
        self._broken.append(connection)
        self._agreed.loses_connection(number)

    def _check_silence(self) -> None:
        for number in [*self._connections]:
            if self._active_seconds - self._heard[number] > self._silence_seconds:
                self._agreed.does_not_reach(number)

    def _send(self, number: int, message: Mapping[str, Any]) -> None:
        connection = self._connections.get(number)
        if connection is not None:
            with contextlib.suppress(ConnectionClosedError):  # `_receive` sees it, too
                connection.send(message)
