"""Heartbeats from a worker to the supervisor of its host: liveness, progress, and the error that ends it.

`tfdist run` gives each worker one end of a pair of datagram sockets; `TFDIST_HEARTBEAT_FD` is its file descriptor. Each
datagram is a JSON object with any of these keys:

| key          | value                                                                                                 |
|--------------|-------------------------------------------------------------------------------------------------------|
| `alive`      | true; false when the process exits: silence has no meaning after that                                 |
| `fit`        | number of the `fit` in its process, 1 if missing. The following keys start again in each `fit`        |
| `step`       | number of completed training steps                                                                    |
| `saved`      | sequence number of the newest complete checkpoint                                                     |
| `saved_step` | number of training steps in that checkpoint                                                           |
| `ready`      | true once everything is restored and training begins                                                  |
| `phase`      | activity in place of training steps, such as "validation"; no step is expected while it is set        |
| `batch`      | number of completed batches in this phase, if batches are expected in place of steps                  |
| `error`      | the uncaught exception: {"type": "ValueError", "message": "…"}                                        |
| `membership` | changes of an elastic training so far: "lost", "joined", "repeated_steps", "seconds_lost", "training" |

A datagram that has `membership` alone is from a process without a started heartbeat, and says nothing else.
"""

import atexit
import contextlib
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

_STEP_INTERVAL_SECONDS = 0.05  # limits the rate of messages for short steps
_MAX_MESSAGE = 2000
_FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL


class Heartbeat:
    """The worker's end of the socket pair. Its methods never block, and do not raise after the supervisor has exited.

    Every datagram contains the complete state, so that a dropped one does no harm.

    Args:
        fd: File descriptor of an AF_UNIX datagram socket. It is duplicated; the caller closes the original.

    >>> supervisor, worker = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    >>> heartbeat = Heartbeat(worker.fileno())
    >>> heartbeat.step(41)
    >>> supervisor.recv(1000)
    b'{"alive": true, "step": 41}'
    >>> heartbeat.close(), supervisor.close(), worker.close()
    (None, None, None)
    """

    _active: ClassVar["Heartbeat | None"] = None
    _fits: ClassVar[int] = 0  # how many were started in this process

    def __init__(self, fd: int) -> None:
        duplicate = os.dup(fd)
        try:
            self._socket = socket.socket(fileno=duplicate)
        except OSError:
            os.close(duplicate)
            raise
        self._pid = os.getpid()  # a forked child must not send for the worker
        self._fit = 1
        self._step: int | None = None
        self._saved: tuple[int, int] | None = None  # one assignment: the sending thread reads both
        self._ready = False
        self._phase: tuple[str, int | None] | None = None  # name and batches; one assignment, too
        self._error: Mapping[str, str] | None = None
        self._membership: Mapping[str, float] | None = None
        self._next_step_at = 0.0
        self._thread: threading.Thread | None = None
        # A message must not overtake a newer one. Handlers of signals may send while their own thread does.
        self._sending = threading.RLock()
        self._stopped = threading.Event()

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
        except (OSError, OverflowError):  # a child of the worker inherits the variable, not the socket
            return None
        if (heartbeat._socket.family, heartbeat._socket.type) != (socket.AF_UNIX, socket.SOCK_DGRAM):
            heartbeat.close()
            return None
        return heartbeat

    @classmethod
    def of_training(cls, step: int) -> "Heartbeat | None":
        """Starts the heartbeat of a worker of `tfdist run` whose training begins after a step; None elsewhere.

        Args:
            step: Steps completed so far in this training.
        """
        heartbeat = cls.from_environment()
        if heartbeat is not None:
            heartbeat.start()
            heartbeat.ready()
            heartbeat.step(step)
        return heartbeat

    def start(self) -> None:
        """Starts sending every 0.25 s until the process exits, and reports an uncaught exception.

        From now on the supervisor takes silence for a frozen process. A process has one active heartbeat: this stops
        the one of an earlier training. A restarted program reaches the same training after the same number of calls,
        so that the numbers of `fit` and `step` together are its progress.
        """
        if self._thread is not None:
            return
        if Heartbeat._active is not None:
            Heartbeat._active._stop(process_exits=False)
        Heartbeat._active = self
        Heartbeat._fits += 1
        self._fit = Heartbeat._fits
        self._hook = sys.excepthook
        sys.excepthook = self._report_uncaught
        self._thread = threading.Thread(target=self._send_repeatedly, name="tfdist-heartbeat", daemon=True)
        self._thread.start()
        # Registered late, so that it runs before TensorFlow's teardown, which may take long and hold the GIL.
        atexit.register(self.close)

    def step(self, number: int) -> None:
        """Reports a completed training step, which ends a phase.

        Args:
            number: Steps completed so far in this training.
        """
        self._step, self._phase = int(number), None
        self._send_at_limited_rate()

    def saved(self, sequence: int, step: int) -> None:
        """Reports a complete checkpoint. Any thread may call this.

        Args:
            sequence: Sequence number of the checkpoint.
            step: Number of training steps in it.
        """
        self._saved = int(sequence), int(step)
        self._send()

    def ready(self) -> None:
        """Reports that everything is restored and training begins."""
        self._ready = True
        self._send()

    def phase(self, name: str) -> None:
        """Reports that no step is expected until the next call of `step`.

        Args:
            name: The activity, such as "validation", or "finished" at the end of training.
        """
        self._phase = name, None
        self._send()

    def batch(self, number: int) -> None:
        """Reports a completed batch of the current phase. More batches are expected from now on.

        Without a phase this does nothing.

        Args:
            number: Batches completed so far in this phase.
        """
        if self._phase is not None:
            self._phase = self._phase[0], int(number)
            self._send_at_limited_rate()

    def membership(
        self, *, lost: int, joined: int, repeated_steps: int, seconds_lost: float, training: int | None = None
    ) -> None:
        """Reports the losses and joins that this worker of an elastic training has seen. Any thread may call this.

        The heartbeat that is started in this process sends them, whichever that is. Without one they are sent alone:
        the supervisor then expects no further heartbeats. The first report of a worker that was started again says that
        it has joined the others.

        Args:
            lost: Number of workers that were lost since the attempt began.
            joined: Number of workers that joined the others since then.
            repeated_steps: Number of steps that were computed again since then.
            seconds_lost: Time that losses and joins have cost since then, in seconds.
            training: Number of workers that train now; None: unknown.

        >>> supervisor, worker = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        >>> heartbeat = Heartbeat(worker.fileno())
        >>> heartbeat.membership(lost=1, joined=0, repeated_steps=1, seconds_lost=0.2)
        >>> supervisor.recv(1000)
        b'{"membership": {"lost": 1, "joined": 0, "repeated_steps": 1, "seconds_lost": 0.2}}'
        >>> heartbeat.close(), supervisor.close(), worker.close()
        (None, None, None)
        """
        totals = {
            "lost": int(lost),
            "joined": int(joined),
            "repeated_steps": int(repeated_steps),
            "seconds_lost": float(seconds_lost),
            **({} if training is None else {"training": int(training)}),
        }
        active = Heartbeat._active
        if active is not None:
            active._membership = totals
            active._send()
        elif os.getpid() == self._pid:
            self._send_message({"membership": totals})

    def error(self, error: BaseException) -> None:
        """Reports the exception that ends this process."""
        self._error = {"type": type(error).__qualname__, "message": str(error)[:_MAX_MESSAGE]}
        self._send()

    def close(self) -> None:
        """Stops sending. A started heartbeat reports that the process exits."""
        self._stop(process_exits=True)

    def _stop(self, *, process_exits: bool) -> None:
        if self._stopped.is_set():
            return
        self._stopped.set()
        if self._thread is not None and os.getpid() == self._pid:
            self._thread.join(timeout=1.0)
            if sys.excepthook == self._report_uncaught:
                sys.excepthook = self._hook
            atexit.unregister(self.close)
            if Heartbeat._active is self:
                Heartbeat._active = None
            if process_exits:
                self._send(alive=False)
        self._socket.close()

    def _send_repeatedly(self) -> None:
        while not self._stopped.is_set():
            self._send()
            self._stopped.wait(INTERVAL_SECONDS)

    def _report_uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self.error(error)
        self._hook(kind, error, trace)

    def _send_at_limited_rate(self) -> None:
        now = time.monotonic()
        if now >= self._next_step_at:
            self._next_step_at = now + _STEP_INTERVAL_SECONDS
            self._send()

    def _send(self, *, alive: bool = True) -> None:
        if os.getpid() != self._pid:
            return
        with self._sending:
            saved, saved_step = self._saved or (None, None)
            phase, batch = self._phase or (None, None)
            state: dict[str, Any] = {
                "alive": alive,
                "fit": self._fit if self._fit > 1 else None,
                "step": self._step,
                "saved": saved,
                "saved_step": saved_step,
                "phase": phase,
                "batch": batch,
                "error": self._error,
                "ready": self._ready or None,
                "membership": self._membership,
            }
            self._send_message({key: value for key, value in state.items() if value is not None})

    def _send_message(self, message: Mapping[str, Any]) -> None:
        # If the supervisor has exited or its buffer is full: the next datagram has the same content.
        with self._sending, contextlib.suppress(OSError):
            self._socket.send(json.dumps(message).encode(), _FLAGS)
