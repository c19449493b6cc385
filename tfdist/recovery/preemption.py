"""Signals that ask the training to save and end, and the step at which all workers do."""

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from tfdist.recovery.agreement import Agreement

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # the second is what Slurm sends by `--signal=USR1@60`
# A scheduler may signal every process, and the supervisor pass its own signal on: that is one notice.
_ONE_NOTICE_SECONDS = 1.0
_STOP, _CLOSED = "stop", "closed"  # what is said to the listening threads: a step, or that there is none


class Preemption:
    """Hears the signals on any worker and finds the next step that all workers have in common.

    The worker that is told proposes the step after its present one and goes on only when all have heard of it. Steps
    of synchronous training hold each other: no worker can have passed that step. TensorFlow's coordination service
    swallows SIGTERM, so handlers must be set after the strategy is made. A second signal, a second later or more, ends
    the process at once. A signal after `fit` has been left by an exception does what it did before `fit`. One that
    came too late to end a `fit` ends the next one.
    """

    _owed_since: float | None = None  # when a signal has asked this process to end, which has not begun to

    def __init__(self, agreement: Agreement, is_in_fit: Callable[[FrameType | None], bool] | None = None) -> None:
        """Hears nothing before `listen`.

        Args:
          agreement: between the workers.
          is_in_fit: whether a frame that a signal has interrupted was called by `fit`; `None` if all are.
        """
        self._agreement, self._is_in_fit = agreement, is_in_fit
        self._told = threading.Event()
        self._told_at = 0.0
        self._stop_step: int | None = None
        self._previous: dict[int, Any] = {}

    def listen(self) -> bool:
        """Sets the handlers; returns whether this thread may (only the main thread can)."""
        can_handle = threading.current_thread() is threading.main_thread()
        if can_handle:
            self._previous = {number: _beneath(number, signal.signal(number, self._heed)) for number in _SIGNALS}
            if Preemption._owed_since is not None:
                self._told_at = Preemption._owed_since
                self._told.set()
        if self._agreement.workers > 1:
            threading.Thread(target=self._hear_others, name="tfdist-preemption", daemon=True).start()
        return can_handle

    def is_due(self, step: int) -> bool:
        """Whether the training should save and end after `step`; to be asked by all workers after every step."""
        if self._told.is_set() and self._stop_step is None:
            self._propose(step)
        return self._stop_step is not None and step >= self._stop_step

    def stop_listening(self) -> None:
        """Puts the former handlers back, where nobody has set others since."""
        for number, handler in self._previous.items():
            if signal.getsignal(number) == self._heed:
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous = {}

    def leave(self) -> None:
        """To be called when the process begins to end, as it was asked to."""
        Preemption._owed_since = None
        if self._agreement.workers == 1:
            self.stop_listening()

    def close(self) -> None:
        """To be called by all workers when the training is over, so that nobody waits for a step any more."""
        if self._agreement.workers > 1 and self._agreement.rank == 0:
            self._agreement.first(_STOP, _CLOSED)  # ends the others' threads

    def _heed(self, number: int, frame: FrameType | None) -> None:
        if self._is_in_fit is not None and not self._is_in_fit(frame):
            self.stop_listening()
            os.kill(os.getpid(), number)
            return
        now = time.monotonic()
        if not self._told.is_set():
            self._told_at = Preemption._owed_since = now
            self._told.set()
        elif now > self._told_at + _ONE_NOTICE_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _propose(self, step: int) -> None:
        if self._agreement.workers == 1:
            self._stop_step = step
            return
        agreed = self._agreement.first(_STOP, step + 1)  # or the first one behind it that they ask at
        if agreed == _CLOSED:
            self._told.clear()
            return
        self._agreement.wait_for_all("heard")  # by the threads below, this worker's, too

    def _hear_others(self) -> None:
        try:
            agreed = self._agreement.hear(_STOP)
        except Exception:  # the cluster has ended
            return
        if agreed != _CLOSED:
            self._stop_step = int(agreed)
            self._agreement.arrive("heard")


def _beneath(number: int, handler: Any) -> Any:
    """`handler`, or what was there before it if it belongs to a `fit` that an exception has ended."""
    owner = getattr(handler, "__self__", None)
    return owner._previous.get(number, signal.SIG_DFL) if isinstance(owner, Preemption) else handler
