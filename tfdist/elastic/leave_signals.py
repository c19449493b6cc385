"""Signals by which a worker of an elastic training is asked to leave."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType

from tfdist.recovery.preemption import SAME_NOTICE_SECONDS


class LeaveSignals:
    """Handles signals from `handle` to `restore`, unless the program handles them itself.

    The first one asks this worker to leave. A second one, at least a second later, has its default action: it ends the
    process. One that came too late to make the worker leave has it in `restore`.

    Args:
        ask_to_leave: Called by the handler: it must not wait for a lock.
    """

    def __init__(self, ask_to_leave: Callable[[], None]) -> None:
        self._ask_to_leave = ask_to_leave
        self._handled: list[int] = []
        self._received: int | None = None
        self._received_at = 0.0

    def handle(self, numbers: Iterable[int]) -> None:
        """Handles the signals of these numbers that have their default action. Only the main thread can do so."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in numbers:
            if signal.getsignal(number) == signal.SIG_DFL:
                signal.signal(number, self._handle)
                self._handled.append(number)

    def restore(self) -> None:
        """Gives the signals their default action again, unless the program has set another handler since."""
        for number in self._handled:
            if signal.getsignal(number) == self._handle:
                signal.signal(number, signal.SIG_DFL)
        self._handled = []
        received, self._received = self._received, None
        if received is not None:
            signal.raise_signal(received)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        now = time.monotonic()
        if self._received is None:
            self._received, self._received_at = number, now
            self._ask_to_leave()
        elif now > self._received_at + SAME_NOTICE_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
