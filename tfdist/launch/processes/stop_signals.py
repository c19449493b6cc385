"""The signals that end a run: Ctrl-C, SIGTERM, a closed terminal, and SIGUSR1, by which Slurm announces the end."""

import math
import os
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
# Slurm may signal this process while the shell that started it passes on its own signal: both are one.
_SAME_SIGNAL_SECONDS = 1.0


class StopSignals:
    """Collects the signals that would end this process, inside a `with` block of the main thread.

    The same signal within a second of the one that was counted last is not counted. `on_repeat` is called in the signal
    handler when a signal arrives again, so that a launcher that is blocked by a paused terminal still kills its
    workers.
    """

    def __init__(self, on_repeat: Callable[[], None]) -> None:
        self._on_repeat = on_repeat
        self.received: list[int] = []
        self._before: dict[int, Any] = {}
        self._counted_at: dict[int, float] = {}

    def __enter__(self) -> "StopSignals":
        self.fd, self._wakeup = os.pipe()
        for fd in (self.fd, self._wakeup):
            os.set_blocking(fd, False)
        self._wakeup_before = signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            # Under nohup, a closed terminal must not end the run.
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self.fd)
        os.close(self._wakeup)

    def clear_wakeup(self) -> None:
        """Empties the pipe behind `fd`, which is readable after every signal."""
        try:
            while os.read(self.fd, 512):
                pass
        except BlockingIOError:
            pass

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - self._counted_at.get(number, -math.inf) < _SAME_SIGNAL_SECONDS:
            return
        self._counted_at[number] = now
        self.received.append(number)
        if self.received.count(number) > 1:
            self._on_repeat()
