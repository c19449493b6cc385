"""Starts the workers, passes their output on, and ends all of them when one fails."""

import os
import selectors
import signal
import time
from collections.abc import Mapping, Sequence
from typing import BinaryIO

from tfdist.launch.failure import WorkerEnd, cause, signal_name
from tfdist.launch.guardian import Guardian
from tfdist.launch.linux import become_subreaper
from tfdist.launch.output import Console, OutputClosed, WorkerOutput
from tfdist.launch.stop_signals import StopSignals
from tfdist.launch.worker_process import WorkerProcess, children, end_strays

_ENDING_POLL_SECONDS = 0.05
_UNFINISHED_POLL_SECONDS = 0.25
_NO_PIDFD_POLL_SECONDS = 0.01
# What the kernel does not let die even of SIGKILL (a stuck disk) is not waited for for ever.
_UNKILLABLE_SECONDS = 30.0


class Supervisor:
    """One run of the workers of this host.

    All of it happens in one thread, the main thread: the kernel kills a worker when the *thread* that started it ends,
    and a fork is safe only without others. The kernel queues the ends of the workers in the order in which they
    happened (epoll, pidfd), so the first failure is the first even when the launcher slept.

    Args:
        command: What every worker runs.
        environments: The whole environment of each worker, by rank.
        console: Where output and messages go.
        logs: A log file for each worker, or None.
        grace_seconds: Time between SIGTERM and SIGKILL when workers are ended.
    """

    def __init__(
        self,
        command: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        console: Console,
        logs: Sequence[BinaryIO | None],
        *,
        grace_seconds: float,
    ) -> None:
        self._command, self._environments = command, environments
        self._console, self._grace = console, grace_seconds
        self._outputs = [WorkerOutput(rank, console, log) for rank, log in enumerate(logs)]
        self._workers: list[WorkerProcess] = []
        self._guarded: set[int] = set()  # the groups that are not gone
        self._ends: list[WorkerEnd] = []  # in the order of time
        self._selector = selectors.DefaultSelector()
        self._kill_at: float | None = None  # set: the workers have been told to end
        self._patience_until: float | None = None  # set: the only failures so far are echoes
        self._killed_at: float | None = None
        self._stop_signal: int | None = None
        self._heeded_signals = 0

    def run(self) -> int:
        """Runs the workers to their end.

        Returns:
            0, the first failure's exit code, or 128 + the number of the signal that ended the run.
        """
        become_subreaper()
        spared = children()
        self._guardian = Guardian()
        self._spared = {*spared, self._guardian.pid}
        try:
            with StopSignals(on_repeat=self._kill) as self._signals:
                self._selector.register(self._signals.fd, selectors.EVENT_READ, self._signals.clear_wakeup)
                try:
                    self._start()
                    while not self._is_over():
                        self._step()
                    self._close_streams()
                    return self._conclude()
                except OutputClosed:
                    # As for any command whose reader went away.
                    self._stop_signal = signal.SIGPIPE
                    return 128 + signal.SIGPIPE
                finally:
                    self._end_silently()
        finally:
            for output in self._outputs:
                output.close()
            self._selector.close()
            self._guardian.close()

    def _start(self) -> None:
        for rank, environ in enumerate(self._environments):
            if self._signals.received:
                return
            worker = WorkerProcess(rank, self._command, environ)
            self._workers.append(worker)
            self._guardian.watch(worker.pid)
            self._guarded.add(worker.pid)
            for fd, is_error in worker.streams.items():
                self._selector.register(fd, selectors.EVENT_READ, (worker, is_error))
            if worker.pidfd is not None:
                self._selector.register(worker.pidfd, selectors.EVENT_READ, worker)

    def _step(self) -> None:
        for key, _ in self._selector.select(self._poll_seconds()):
            if isinstance(key.data, WorkerProcess):
                self._collect(key.data)
            elif isinstance(key.data, tuple):
                self._read(key.fd, *key.data)
            else:
                key.data()
        for worker in self._workers:
            if worker.pidfd is None and worker.returncode is None:
                self._collect(worker)
        now = time.monotonic()
        for output in self._outputs:
            output.show_unfinished(now=now)
        self._heed_signals()
        if self._kill_at is None and self._all_ended():
            self._tell_to_end()  # for what they left behind
        if self._patience_until is not None and self._kill_at is None and now >= self._patience_until:
            self._tell_to_end()
        if self._kill_at is not None and self._killed_at is None and now >= self._kill_at:
            self._kill()

    def _poll_seconds(self) -> float | None:
        if any(worker.pidfd is None and worker.returncode is None for worker in self._workers):
            return _NO_PIDFD_POLL_SECONDS
        if self._kill_at is not None or self._patience_until is not None or self._all_ended():
            return _ENDING_POLL_SECONDS
        return _UNFINISHED_POLL_SECONDS if any(output.is_pending for output in self._outputs) else None

    def _read(self, fd: int, worker: WorkerProcess, is_error: bool) -> bool:
        """Passes one piece of output on. Returns whether there may be more."""
        try:
            data = os.read(fd, 65_536)
        except BlockingIOError:
            return False
        if not data:
            self._selector.unregister(fd)
            return False
        self._outputs[worker.rank].feed(data, is_error=is_error, now=time.monotonic())
        return True

    def _collect(self, worker: WorkerProcess) -> None:
        returncode = worker.reap()
        if returncode is None:
            return
        if worker.pidfd is not None:
            self._selector.unregister(worker.pidfd)
        self._drain(worker)
        output = self._outputs[worker.rank]
        end = WorkerEnd(worker.rank, returncode, output.last_lines, was_told=bool(worker.told))
        self._ends.append(end)
        if not end.failed or self._kill_at is not None:
            return
        self._console.say(f"worker {end.rank} failed: {end.describe()}")
        if not end.is_echo:
            self._tell_to_end()
        elif self._patience_until is None:
            # It only tells that a peer is gone. Told to end now, that peer could not say any more why.
            self._patience_until = time.monotonic() + self._grace

    def _drain(self, worker: WorkerProcess) -> None:
        for fd, is_error in worker.streams.items():
            while fd in self._selector.get_map() and self._read(fd, worker, is_error):
                pass
        self._outputs[worker.rank].flush(now=time.monotonic())

    def _heed_signals(self) -> None:
        received = self._signals.received
        if len(received) == self._heeded_signals:
            return
        self._heeded_signals = len(received)
        if self._stop_signal is None and cause(self._ends) is None:
            self._stop_signal = received[0]
        if self._killed_at is not None:
            self._kill()  # those that were being started when the signal came again
        elif self._kill_at is None:
            self._console.say(
                f"{signal_name(received[0])}: ending the workers (SIGTERM, after {self._grace:g} s SIGKILL; at once if "
                "it comes again)"
            )
            self._tell_to_end()
        else:
            self._console.say(
                f"{signal_name(received[-1])}: the workers are being ended already (SIGKILL if it comes again)"
            )

    def _tell_to_end(self) -> None:
        self._kill_at = time.monotonic() + self._grace
        for worker in self._workers:
            worker.tell(signal.SIGTERM)

    def _kill(self) -> None:
        if self._kill_at is None:
            self._kill_at = time.monotonic()
        self._killed_at = time.monotonic()
        for worker in self._workers:
            worker.tell(signal.SIGKILL)

    def _all_ended(self) -> bool:
        return all(worker.returncode is not None for worker in self._workers)

    def _is_over(self) -> bool:
        if self._killed_at is not None and time.monotonic() > self._killed_at + _UNKILLABLE_SECONDS:
            return True
        for worker in self._workers:
            if worker.pid in self._guarded and worker.is_gone():
                self._guarded.remove(worker.pid)
                self._guardian.forget(worker.pid)
        return not self._guarded

    def _close_streams(self) -> None:
        for worker in self._workers:
            self._drain(worker)

    def _conclude(self) -> int:
        if self._stop_signal is not None:
            return 128 + self._stop_signal
        first = cause(self._ends)
        if first is None:
            return 0
        others = [f"worker {end.rank} ended after that: {end.describe()}" for end in self._ends if end != first]
        self._console.say(*others, *first.report())
        # A worker that was told to end before it ended by itself had still raised an error of its own.
        return 1 if first.was_told else first.exit_code

    def _end_silently(self) -> None:
        """Leaves nothing behind, whatever went wrong before."""
        deadline = time.monotonic() + (self._grace if self._stop_signal == signal.SIGPIPE else 0.0)
        if self._stop_signal == signal.SIGPIPE and self._kill_at is None:
            self._tell_to_end()
        while not self._are_gone() and time.monotonic() < deadline:
            time.sleep(_ENDING_POLL_SECONDS)
        if not self._are_gone():
            self._kill()
        while not self._is_over():
            self._are_gone()
            time.sleep(_ENDING_POLL_SECONDS)
        for worker in self._workers:
            worker.close()
        end_strays(spared=self._spared)

    def _are_gone(self) -> bool:
        for worker in self._workers:
            worker.reap()
        return all(worker.is_gone() for worker in self._workers)
