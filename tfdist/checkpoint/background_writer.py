"""Writes in the background, one job at a time, and loses no error."""

import logging
import threading
import time
import weakref
from collections.abc import Callable

_log = logging.getLogger("tfdist")


class BackgroundWriter:
    """Runs jobs in the background, one at a time. One thread uses it.

    A job's error is raised by the next `submit` or `wait`, whatever comes first. When the interpreter ends, a job that
    is running is finished, and an error that nobody has heard of is logged.

    Attributes:
      seconds: how long each job took that has ended, in order.

    >>> writer, written = BackgroundWriter(), []
    >>> waited_seconds = writer.submit(lambda: written.append(1))
    >>> writer.wait()
    >>> written, len(writer.seconds), writer.is_busy
    ([1], 1, False)
    """

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._thread: threading.Thread | None = None
        self._errors: list[BaseException] = []
        # Runs when this object or the interpreter ends; the interpreter waits for the threads first.
        weakref.finalize(self, _log_unheard, self._errors)

    @property
    def is_busy(self) -> bool:
        """Whether a job is running."""
        return self._thread is not None and self._thread.is_alive()

    def submit(self, job: Callable[[], object]) -> float:
        """Starts a job, after waiting for the one that is running.

        Returns:
          The seconds it waited.

        Raises:
          BaseException: what the job before raised. `job` is not started then.
        """
        started = time.monotonic()
        self.wait()
        waited_seconds = time.monotonic() - started
        # No daemon: the interpreter waits for it. A thread a job: none is left that would have to be told to end.
        claim = threading.Lock()
        thread = threading.Thread(
            target=_run, args=(claim, job, self.seconds, self._errors), name="tfdist-checkpoint-writer"
        )
        self._thread = thread
        try:
            thread.start()
        except BaseException:  # Ctrl-C, too: the thread may run; where it has not begun, it will not
            claim.acquire(blocking=False)
            raise
        return waited_seconds

    def wait(self) -> None:
        """Waits for the job that is running.

        Raises:
          BaseException: what it, or the one before, raised.
        """
        self.join()
        if self._errors:
            raise self._errors.pop()

    def join(self) -> None:
        """Waits for the job that is running, in any thread; its error stays for `wait`."""
        thread = self._thread
        if thread is not None and thread.is_alive():  # not: given up before it began
            thread.join()


def _run(claim: threading.Lock, job: Callable[[], object], seconds: list[float], errors: list[BaseException]) -> None:
    if not claim.acquire(blocking=False):  # given up before it began
        return
    started = time.monotonic()
    try:
        job()
    except BaseException as error:
        errors.append(error)
    finally:
        seconds.append(time.monotonic() - started)


def _log_unheard(errors: list[BaseException]) -> None:
    for error in errors:
        _log.error("A checkpoint could not be written in the background.", exc_info=error)
