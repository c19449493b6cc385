"""Errors of an exchange, and the failure of a group: the first that is known, which all its exchanges raise."""

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence

from tfdist.exchange.exchange_calls import ExchangeCall, differ_in_shape

# A worker that learned of a failure says so before it closes its connections. So a connection that closes waits this
# long for a better explanation.
_EXPLANATION_SECONDS = 0.15
# Another thread reads the control connection, on which a worker says that it leaves.
_LAST_MESSAGES_SECONDS = 2.0
_POLL_SECONDS = 0.01
HAS_LEFT = "it has ended its training, and the others have not"
NO_MESSAGE = "it sent bytes that are not part of an exchange"


class ExchangeError(RuntimeError):
    """An exchange failed, and so do all later ones of the same connections.

    Attributes:
        leaves_workers: Whether all workers are still there, so that new strategies can connect them again.
    """

    leaves_workers = False


class WorkerLostError(ExchangeError):
    """Another worker, of rank `rank`, ended, lost its connection, is silent, or sent what no worker sends."""

    def __init__(self, rank: int, cause: str, doing: str) -> None:
        super().__init__(
            f"Worker {rank} is lost. Received: {cause}, during {doing}. Expected: all workers take part in each "
            "exchange. The log of that worker says why. Restart the workers together, as `tfdist run --max-restarts` "
            "does."
        )
        self.rank, self.cause = rank, cause


class LateWorkerError(ExchangeError):
    """An exchange, `call`, waited for workers for longer than the program allows."""

    leaves_workers = True

    def __init__(self, ranks: Sequence[int], seconds: float, call: str) -> None:
        self.ranks, self.seconds, self.call = list(ranks), seconds, call
        super().__init__(
            "An exchange takes longer than `timeout_seconds` of `communication_options`. Received: "
            f"{call}, which waits for worker {', '.join(map(str, self.ranks))} for more than {seconds:g} s. Expected: "
            "all workers take part within that time. Look at what these workers do, or raise the limit; without one, "
            "lost and silent workers are found, too."
        )


class ClosedExchangeError(ExchangeError):
    """This worker has left the exchange, but calls another one."""

    def __init__(self, call: str) -> None:
        super().__init__(
            f"The exchange with the other workers is closed. Received: {call}. Expected: exchanges before the program "
            "ends. Let all threads that train, evaluate or predict end before the main program."
        )


class ExchangeMismatchError(ExchangeError):
    """Workers called different exchanges: another program, other shapes, or another number of batches."""

    leaves_workers = True

    def __init__(self, calls: dict[int, str]) -> None:
        self.calls = calls
        received = "; ".join(f"worker {rank}: {call}" for rank, call in sorted(calls.items()))
        if differ_in_shape(calls.values()):
            received += " (Shape mismatch)"  # TensorFlow's words
        super().__init__(
            f"The workers call different exchanges. Received: {received}. Expected: the same exchanges in the same "
            "order on all workers. Run the same program with the same arguments everywhere, and give all workers "
            "the same number of batches and models of the same shapes."
        )


class GroupFailure:
    """The first failure."""

    def __init__(self) -> None:
        # It becomes readable when there is a failure, so that who polls wakes up.
        self.descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        weakref.finalize(self, os.close, self.descriptor).atexit = False
        self.left: set[int] = set()  # the workers that have ended their training in order
        self.tell: Callable[[ExchangeError], None] | None = None  # called once, before any exchange raises the failure
        self._error: ExchangeError | None = None
        self._known = threading.Event()
        self._lock = threading.Lock()
        # Called with a channel, and the exchange on it that cannot progress at the moment.
        self.tell_stalled: Callable[[str, ExchangeCall], None] | None = None
        self._running: dict[str, ExchangeCall] = {}  # by channel
        self._stalled: set[str] = set()

    def begins(self, channel: str, call: ExchangeCall) -> None:
        self._running[channel] = call

    def ends(self, channel: str) -> None:
        self._running.pop(channel, None)
        self._stalled.discard(channel)

    def stalls(self, channel: str) -> None:
        """Notes that the exchange on a channel with a common order cannot progress at the moment."""
        self._stalled.add(channel)
        if self.tell_stalled is not None:
            self.tell_stalled(channel, self._running[channel])

    def stalls_elsewhere(self, own_rank: int, rank: int, channel: str, number: int, call: str) -> None:
        """Compares an exchange that has stalled on worker `rank` with those of this worker.

        Workers that wait for the same number in the common order on different channels would wait forever.
        """
        for name in self._stalled - {channel}:
            running = self._running.get(name)
            if running is not None and running.number == number:
                self.mismatch({own_rank: f"{running}, {name}", rank: f"{call}, {channel}"})

    def lost(self, rank: int, cause: str) -> None:
        """Records that a worker is lost, unless a failure is known already."""
        doing = ", ".join(str(call) for call in self._running.copy().values())
        self._record(lambda: WorkerLostError(rank, cause, doing or "no exchange"))

    def late(self, ranks: Sequence[int], seconds: float, call: str) -> None:
        """Records that workers do not take part in an exchange in time, unless a failure is known already."""
        self._record(lambda: LateWorkerError(ranks, seconds, call))

    def lost_link(self, rank: int, cause: str) -> None:
        """Records a lost worker by its broken link, unless a better explanation arrives in a moment."""
        if self._known.wait(_EXPLANATION_SECONDS):
            return
        end = time.monotonic() + _LAST_MESSAGES_SECONDS
        while rank not in self.left and time.monotonic() < end:
            if self._known.wait(_POLL_SECONDS):
                return
        self.lost(rank, HAS_LEFT if rank in self.left else cause)

    def mismatch(self, calls: dict[int, str]) -> None:
        """Records that two workers called different exchanges, unless a failure is known already."""
        self._record(lambda: ExchangeMismatchError(calls))

    @property
    def error(self) -> ExchangeError | None:
        return self._error

    def wait(self) -> None:
        self._known.wait()

    def check(self) -> None:
        if self._error is not None:
            raise self._error.with_traceback(None)

    def _record(self, make: Callable[[], ExchangeError]) -> None:
        with self._lock:
            if self._error is not None:
                return
            error = make()
            if self.tell is not None:
                self.tell(error)
            self._error = error
        self._known.set()
        os.eventfd_write(self.descriptor, 1)
