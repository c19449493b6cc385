"""What a worker tells the supervisor of its host: that it is alive, how far it is, and why it fails.

`tfdist run` gives each worker one end of a pair of datagram sockets and its number in `TFDIST_HEARTBEAT_FD`. A datagram
is one JSON object with any of these keys:

| key          | value                                                                                                 |
|--------------|-------------------------------------------------------------------------------------------------------|
| `alive`      | true; false when the process is leaving: from then on its silence means nothing                       |
| `fit`        | which training of its process this is; without it the first. What follows is counted anew in each     |
| `step`       | the number of training steps done                                                                     |
| `saved`      | the sequence number of the newest whole checkpoint                                                    |
| `saved_step` | the number of training steps that it holds                                                            |
| `ready`      | true once everything is restored and training begins                                                  |
| `phase`      | what it does instead of training steps, such as "validation"; while this is set no step is expected   |
| `batch`      | the number of batches done in this phase, where these are expected in place of steps                  |
| `error`      | the exception that nobody caught: {"type": "ValueError", "message": "…"}                              |
"""

import atexit
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, ClassVar

VARIABLE = "TFDIST_HEARTBEAT_FD"
INTERVAL_SECONDS = 0.25

_STEP_INTERVAL_SECONDS = 0.05  # steps may be shorter than what it is worth to tell of each
_MAX_MESSAGE = 2000
_FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL


class Heartbeat:
    """The worker's end. Nothing here waits, and nothing raises once the supervisor is gone.

    Every datagram carries all that is known, so that one the supervisor had no room for is not missed.

    Args:
        fd: An AF_UNIX datagram socket. It is duplicated, and stays the caller's.

    >>> supervisor, worker = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    >>> heartbeat = Heartbeat(worker.fileno())
    >>> heartbeat.step(41)
    >>> supervisor.recv(1000)
    b'{"alive": true, "step": 41}'
    >>> heartbeat.close(), supervisor.close(), worker.close()
    (None, None, None)
    """

    _beating: ClassVar["Heartbeat | None"] = None
    _fits: ClassVar[int] = 0  # those that have begun in this process

    def __init__(self, fd: int) -> None:
        own = os.dup(fd)
        try:
            self._socket = socket.socket(fileno=own)
        except OSError:
            os.close(own)
            raise
        self._pid = os.getpid()  # a fork of the worker must not speak for it
        self._fit = 1
        self._step: int | None = None
        self._saved: tuple[int, int] | None = None  # set at once: the thread that beats reads both
        self._ready = False
        self._phase: tuple[str, int | None] | None = None  # and its batches; set at once, too
        self._error: Mapping[str, str] | None = None
        self._next_step_at = 0.0
        self._thread: threading.Thread | None = None
        self._is_over = threading.Event()

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> "Heartbeat | None":
        """Returns the heartbeat of a worker of `tfdist run`, or None for any other process.

        Args:
            environ: The environment. Defaults to `os.environ`.

        >>> Heartbeat.from_environment({}) is None
        True
        """
        number = (os.environ if environ is None else environ).get(VARIABLE, "")
        if not (number.isascii() and number.isdigit()):
            return None
        try:
            heartbeat = cls(int(number))
        except (OSError, OverflowError):  # a process started by the worker, which got the variable but not the socket
            return None
        if (heartbeat._socket.family, heartbeat._socket.type) != (socket.AF_UNIX, socket.SOCK_DGRAM):
            heartbeat.close()
            return None
        return heartbeat

    def start(self) -> None:
        """Begins to beat every 0.25 s until the process ends, and to tell of an exception that nobody catches.

        From now on silence counts as a frozen process. One heartbeat beats in a process: that of an earlier training
        stops here. A program that is started again comes to the same training by as many starts, so that the number
        of a training and that of a step tell together how far it is.
        """
        if self._thread is not None:
            return
        if Heartbeat._beating is not None:
            Heartbeat._beating._stop(is_process_leaving=False)
        Heartbeat._beating = self
        Heartbeat._fits += 1
        self._fit = Heartbeat._fits
        self._hook = sys.excepthook
        sys.excepthook = self._tell_of
        self._thread = threading.Thread(target=self._beat, name="tfdist-heartbeat", daemon=True)
        self._thread.start()
        # Registered late, so run early: what TensorFlow tears down after it may take long and hold the GIL.
        atexit.register(self.close)

    def step(self, number: int) -> None:
        """Tells that a training step is done. It ends a phase.

        Args:
            number: The steps done so far, counted over the whole training.
        """
        self._step, self._phase = int(number), None
        self._send_now_and_then()

    def saved(self, sequence: int, step: int) -> None:
        """Tells that a checkpoint is whole. It may be called by any thread.

        Args:
            sequence: Its sequence number.
            step: The training steps that it holds.
        """
        self._saved = int(sequence), int(step)
        self._send()

    def ready(self) -> None:
        """Tells that everything is restored and training begins."""
        self._ready = True
        self._send()

    def phase(self, name: str) -> None:
        """Tells that until the next `step` no step is to be expected.

        Args:
            name: What happens instead, for example "validation", or "finished" at the end of training.
        """
        self._phase = name, None
        self._send()

    def batch(self, number: int) -> None:
        """Tells of the batches of the present phase: from now on more are expected. Without a phase it does nothing.

        Args:
            number: Those that are done, counted in this phase.
        """
        if self._phase is not None:
            self._phase = self._phase[0], int(number)
            self._send_now_and_then()

    def error(self, error: BaseException) -> None:
        """Tells of the exception that ends this process."""
        self._error = {"type": type(error).__qualname__, "message": str(error)[:_MAX_MESSAGE]}
        self._send()

    def close(self) -> None:
        """Says that the process is leaving, where it had begun to beat, and beats no more."""
        self._stop(is_process_leaving=True)

    def _stop(self, *, is_process_leaving: bool) -> None:
        if self._is_over.is_set():
            return
        self._is_over.set()
        if self._thread is not None and os.getpid() == self._pid:
            self._thread.join(timeout=1.0)
            self._restore_hooks()
            if is_process_leaving:
                self._send(alive=False)
        self._socket.close()

    def _restore_hooks(self) -> None:
        if sys.excepthook == self._tell_of:
            sys.excepthook = self._hook
        atexit.unregister(self.close)
        if Heartbeat._beating is self:
            Heartbeat._beating = None

    def _beat(self) -> None:
        while not self._is_over.is_set():
            self._send()
            self._is_over.wait(INTERVAL_SECONDS)

    def _tell_of(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self.error(error)
        self._hook(kind, error, trace)

    def _send_now_and_then(self) -> None:
        now = time.monotonic()
        if now >= self._next_step_at:
            self._next_step_at = now + _STEP_INTERVAL_SECONDS
            self._send()

    def _send(self, *, alive: bool = True) -> None:
        if os.getpid() != self._pid:
            return
        known: dict[str, Any] = {"alive": alive}
        saved, saved_step = self._saved or (None, None)
        phase, batch = self._phase or (None, None)
        optional = {
            "fit": self._fit if self._fit > 1 else None,
            "step": self._step,
            "saved": saved,
            "saved_step": saved_step,
            "phase": phase,
            "batch": batch,
            "error": self._error,
        }
        known.update({key: value for key, value in optional.items() if value is not None})
        if self._ready:
            known["ready"] = True
        try:
            self._socket.send(json.dumps(known).encode(), _FLAGS)
        except OSError:  # the supervisor is gone, or slower than this worker: the next datagram says the same
            pass
