"""The failure of a group of workers: the first that is known, which all its exchanges raise."""

import os
import threading
from collections.abc import Callable

from tfdist.exchange.exchange_errors import ExchangeError, ExchangeMismatchError, WorkerLostError

# A worker that learned of a failure says so before it closes its connections. So a connection that closes waits this
# long for a better explanation.
_EXPLANATION_SECONDS = 0.15
HAS_LEFT = "it has ended its training, and the others have not"


class GroupFailure:
    """The first failure.

    Attributes:
        descriptor: Becomes readable when there is a failure, so that who polls wakes up.
        left: The workers that have ended their training in order.
        tell: Called once with the failure, before any exchange raises it.
    """

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.left: set[int] = set()
        self.tell: Callable[[ExchangeError], None] | None = None
        self._error: ExchangeError | None = None
        self._known = threading.Event()
        self._lock = threading.Lock()
        self._doing = "no exchange"

    def during(self, exchange: str | None) -> None:
        """Notes what this worker is doing, for the message."""
        self._doing = exchange or "no exchange"

    def lost(self, rank: int, cause: str) -> None:
        """Records that a worker is lost, unless a failure is known already."""
        self._record(lambda: WorkerLostError(rank, cause, self._doing))

    def lost_link(self, rank: int, cause: str) -> None:
        """Records a lost worker by its broken link, unless a better explanation arrives in a moment."""
        if not self._known.wait(_EXPLANATION_SECONDS):
            self.lost(rank, HAS_LEFT if rank in self.left else cause)

    def mismatch(self, calls: dict[int, str]) -> None:
        """Records that two workers called different exchanges, unless a failure is known already."""
        self._record(lambda: ExchangeMismatchError(calls))

    @property
    def error(self) -> ExchangeError | None:
        """The failure; `None` if there is none."""
        return self._error

    def check(self) -> None:
        """Raises the failure, if there is one."""
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
