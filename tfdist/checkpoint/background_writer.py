"""Writes checkpoints in a background thread, one at a time, without losing an error."""

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable

_NICENESS = 10  # an eighth of the share of other threads
_log = logging.getLogger("tfdist")


class BackgroundWriter:
    """Runs jobs in the background, one at a time. Only one thread may submit and wait.

    The next `submit` or `wait` raises the error of a job. At interpreter exit a running job is finished, and an error
    that was never raised is logged.

    Attributes:
        job_seconds: How long each finished job took, in order.

    >>> writer, written = BackgroundWriter(), []
    >>> waited_seconds = writer.submit(lambda: written.append(1))
    >>> writer.wait()
    >>> written, len(writer.job_seconds), writer.is_busy
    ([1], 1, False)
    """

    def __init__(self) -> None:
        self.job_seconds: list[float] = []
        self._thread: threading.Thread | None = None
        self._errors: list[BaseException] = []
        # Runs when this object is collected or the interpreter exits, which waits for the threads first.
        weakref.finalize(self, _log_unraised, self._errors)

    @property
    def is_busy(self) -> bool:
        """Whether a job is running."""
        return self._thread is not None and self._thread.is_alive()

    def submit(self, job: Callable[[], object]) -> float:
        """Waits for the running job, then starts `job`.

        Returns:
            The seconds that the call waited.

        Raises:
            BaseException: The error of the previous job. `job` is not started in that case.
        """
        started = time.monotonic()
        self.wait()
        waited_seconds = time.monotonic() - started
        # Not a daemon, so that the interpreter waits for it. One thread per job, so that no idle thread must be ended.
        claim = threading.Lock()
        thread = threading.Thread(
            target=_run, args=(claim, job, self.job_seconds, self._errors), name="tfdist-checkpoint-writer"
        )
        self._thread = thread
        try:
            thread.start()
        except BaseException:  # also Ctrl-C: the thread may run already; if it has not begun, it must not begin
            claim.acquire(blocking=False)
            raise
        return waited_seconds

    def wait(self) -> None:
        """Waits for the running job.

        Raises:
            BaseException: The error of this job or of the previous one.
        """
        self.join()
        if self._errors:
            raise self._errors.pop()

    def join(self) -> None:
        """Waits for the running job. Any thread may call it; the error remains for `wait`."""
        thread = self._thread
        if thread is not None and thread.is_alive():  # a thread that was interrupted before its start is not alive
            thread.join()

    def drain(self) -> None:
        """Waits for the running job and logs its error. For a `fit` that has already ended."""
        try:
            self.wait()
        except Exception as error:
            _log.warning("FailureRecovery: the last save of an earlier `fit` failed: %s", error)


_writers: weakref.WeakSet[BackgroundWriter] = weakref.WeakSet()


def create_writer() -> BackgroundWriter:
    """Waits for the jobs of all earlier writers, then returns the writer for one `fit`."""
    for writer in list(_writers):
        writer.join()  # not `wait`: its `fit` may still run, around this one or in another thread, and raises the error
    writer = BackgroundWriter()
    _writers.add(writer)
    return writer


def _run(
    claim: threading.Lock, job: Callable[[], object], job_seconds: list[float], errors: list[BaseException]
) -> None:
    if not claim.acquire(blocking=False):  # interrupted before its start
        return
    started = time.monotonic()
    with contextlib.suppress(AttributeError, OSError):  # Linux: on busy cores the training goes first
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
    try:
        job()
    except BaseException as error:
        errors.append(error)
    finally:
        job_seconds.append(time.monotonic() - started)


def _log_unraised(errors: list[BaseException]) -> None:
    for error in errors:
        _log.error("A checkpoint could not be written in the background.", exc_info=error)
