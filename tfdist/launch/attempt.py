"""One start of all workers: passes their output on, watches them, and ends all of them when one fails."""

import functools
import os
import selectors
import signal
import time
from collections.abc import Mapping, Sequence
from typing import BinaryIO

from tfdist.launch.crew import Crew
from tfdist.launch.failure import WorkerEnd, cause, signal_name, tells_of_a_lost_peer
from tfdist.launch.limits import Graces
from tfdist.launch.liveness import Liveness
from tfdist.launch.outcome import Outcome
from tfdist.launch.output import Console, OutputClosed, WorkerOutput
from tfdist.launch.stop_signals import StopSignals
from tfdist.launch.worker_process import WorkerProcess

_ENDING_POLL_SECONDS = 0.05
_UNFINISHED_POLL_SECONDS = 0.25
_LIVENESS_POLL_SECONDS = 0.25
_NO_PIDFD_POLL_SECONDS = 0.01
# What the kernel does not let die even of SIGKILL (a stuck disk) is not waited for for ever.
_UNKILLABLE_SECONDS = 30.0


class Attempt:
    """One start of the workers of this host.

    All of it happens in one thread, the main thread: the kernel kills a worker when the *thread* that started it ends,
    and a fork is safe only without others. The kernel queues the ends of the workers in the order in which they
    happened (epoll, pidfd), so the first failure is the first even when the launcher slept.

    Args:
        number: Which attempt it is, 0 first.
        environments: The whole environment of each worker, by rank.
        console: Where output and messages go.
        logs: A log file for each worker, or None.
        crew: Starts the workers.
        signals: Those that end the run.
        graces: How long workers are given.
        liveness: Takes their heartbeats.
    """

    def __init__(
        self,
        number: int,
        environments: Sequence[Mapping[str, str]],
        console: Console,
        logs: Sequence[BinaryIO | None],
        *,
        crew: Crew,
        signals: StopSignals,
        graces: Graces,
        liveness: Liveness,
    ) -> None:
        self._number, self._environments = number, environments
        self._console, self._signals = console, signals
        self._graces, self._liveness = graces, liveness
        self._outputs = [WorkerOutput(rank, console, log) for rank, log in enumerate(logs[: len(environments)])]
        self._crew = crew
        self._ends: list[WorkerEnd] = []  # in the order of time
        self._verdicts: dict[int, str] = {}
        self._stall = ""
        self._unstarted: tuple[int, OSError] | None = None
        self._selector = selectors.DefaultSelector()
        self._failed_at: float | None = None
        self._kill_at: float | None = None  # set: the workers have been told to end
        self._patience_until: float | None = None  # set: the only failures so far are echoes
        self._killed_at: float | None = None
        self._stop_signal: int | None = None
        self._heeded_signals = 0
        self._judge_at = 0.0

    def run(self) -> Outcome:
        """Runs the workers until all are gone.

        Raises:
            OutputClosed: If nobody reads the output any more.
        """
        started_at, began = time.time(), time.monotonic()
        self._selector.register(self._signals.fd, selectors.EVENT_READ, self._signals.clear_wakeup)
        try:
            self._start()
            self._heed_signals()  # none may have been started
            while not self._is_over():
                self._step()
            for worker in self._crew.workers:
                self._drain(worker)
        except OutputClosed:
            self._stop_signal = signal.SIGPIPE
            raise
        finally:
            self._end_silently()
            self._selector.close()
        failed_at = self._failed_at or time.monotonic()
        return Outcome(
            self._number,
            len(self._environments),
            tuple(self._ends),
            started_at=started_at,
            failed_at=failed_at,
            seconds=failed_at - began,
            stop_signal=self._stop_signal,
            stall=self._stall,
            unstarted=self._unstarted,
            heard=self._liveness.heard,
            step=self._liveness.step,
            saved=self._liveness.saved,
            errors=self._liveness.errors,
        )

    def kill(self) -> None:
        """Kills all workers at once. It may be called between any two instructions of `run`."""
        if self._kill_at is None:
            self._kill_at = time.monotonic()
        self._killed_at = time.monotonic()
        self._crew.tell(signal.SIGKILL)

    def _start(self) -> None:
        for rank, environ in enumerate(self._environments):
            if self._signals.received:
                return
            try:
                worker = self._crew.hire(rank, environ)
            except OSError as error:
                self._unstarted = (rank, error)
                self._tell_to_end(self._graces.failure)
                return
            for fd, is_error in worker.streams.items():
                self._selector.register(fd, selectors.EVENT_READ, (worker, is_error))
            self._selector.register(worker.heartbeats, selectors.EVENT_READ, functools.partial(self._hear, worker))
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
        for worker in self._crew.running:
            if worker.pidfd is None:
                self._collect(worker)
        now = time.monotonic()
        for output in self._outputs:
            output.show_unfinished(now=now)
        self._heed_signals()
        if self._kill_at is None:
            if not self._crew.running:
                self._tell_to_end(self._graces.failure)  # for what they left behind
            else:
                self._judge()
        if self._kill_at is not None and self._killed_at is None and now >= self._kill_at:
            self.kill()

    def _poll_seconds(self) -> float | None:
        if any(worker.pidfd is None for worker in self._crew.running):
            return _NO_PIDFD_POLL_SECONDS
        if self._kill_at is not None or self._patience_until is not None or not self._crew.running:
            return _ENDING_POLL_SECONDS
        if self._liveness.is_judging:
            return _LIVENESS_POLL_SECONDS
        return _UNFINISHED_POLL_SECONDS if any(output.is_pending for output in self._outputs) else None

    def _judge(self) -> None:
        """Ends the attempt where a worker is frozen, all stand still, or patience is over."""
        if time.monotonic() < self._judge_at:
            return
        running = self._crew.running
        # `select` tells nothing of what came while this process was stopped: that must not count as silence.
        for worker in running:
            self._hear(worker)
        now = time.monotonic()
        self._judge_at = now + _ENDING_POLL_SECONDS
        is_stopped = {worker.rank: worker.is_stopped() for worker in running} if self._liveness.is_judging else {}
        judgement = self._liveness.judge(is_stopped, now=now)
        self._console.say(*judgement.news)
        for rank, reason in judgement.frozen.items():
            self._verdicts[rank] = f"frozen: {reason}"
            self._console.say(f"worker {rank} is frozen: {reason}")
            self._crew.workers[rank].tell(signal.SIGKILL)  # it would hear nothing else
        self._stall = "" if judgement.frozen else judgement.stall
        if self._stall:
            self._console.say(self._stall)
        is_patient = self._patience_until is None or now < self._patience_until or self._liveness.suspects(is_stopped)
        if judgement.frozen or self._stall or not is_patient:
            self._tell_to_end(self._graces.failure)
        elif self._liveness.is_training:
            self._crew.prepare_next(self._environments[0])

    def _hear(self, worker: WorkerProcess) -> None:
        knew = len(self._liveness.errors)
        for datagram in worker.heard():
            self._liveness.hear(worker.rank, datagram, now=time.monotonic())
        if len(self._liveness.errors) > knew and self._patience_until is None:
            # Its interpreter may take long to end. The others are not to wait for that, nor it for them.
            is_echo = tells_of_a_lost_peer(" ".join(self._liveness.errors[worker.rank].values()))
            self._patience_until = time.monotonic() + (self._graces.patience if is_echo else self._graces.failure)

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
        ended_at = time.time()
        self._hear(worker)
        for source in (worker.heartbeats, worker.pidfd):
            if source is not None:
                self._selector.unregister(source)
        self._drain(worker)
        verdict = self._verdicts.get(worker.rank, "")
        was_told = bool(worker.told) and not verdict
        lines = self._outputs[worker.rank].last_lines
        end = WorkerEnd(worker.rank, returncode, lines, was_told=was_told, verdict=verdict, at=ended_at)
        self._ends.append(end)
        if not end.failed or self._kill_at is not None:
            return
        if end.is_preempted:
            # The others are saving, too. A signal now would be their second, which ends them at once.
            self._console.say(f"worker {end.rank} was preempted: it saved and left ({end.describe()})")
            self._patience_until = self._patience_until or time.monotonic() + self._graces.stop
            return
        self._console.say(f"worker {end.rank} failed: {end.describe()}")
        if not end.is_echo:
            self._tell_to_end(self._graces.failure)
        elif self._patience_until is None:
            # It only tells that a peer is gone. Told to end now, that peer could not say any more why.
            self._patience_until = time.monotonic() + self._graces.patience

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
        if self._stop_signal is None and not self._is_failing():
            self._stop_signal = received[0]
        if self._killed_at is not None:
            self.kill()  # those that were being started when the signal came again
        elif self._kill_at is None:
            self._console.say(
                f"{signal_name(received[0])}: ending the workers (SIGTERM, after {self._graces.stop:g} s SIGKILL; at "
                "once if it comes again)"
            )
            self._tell_to_end(self._graces.stop)
        else:
            self._console.say(
                f"{signal_name(received[-1])}: the workers are being ended already (SIGKILL if it comes again)"
            )

    def _is_failing(self) -> bool:
        first = cause(self._ends)
        return bool(self._stall or self._unstarted or self._verdicts) or (first is not None and not first.is_preempted)

    def _tell_to_end(self, grace_seconds: float) -> None:
        self._failed_at = time.monotonic()
        self._kill_at = self._failed_at + grace_seconds
        self._crew.tell(signal.SIGTERM)

    def _is_over(self) -> bool:
        if self._killed_at is not None and time.monotonic() > self._killed_at + _UNKILLABLE_SECONDS:
            return True
        return self._crew.are_gone()

    def _end_silently(self) -> None:
        """Leaves nothing behind, whatever went wrong before."""
        deadline = 0.0
        if self._stop_signal == signal.SIGPIPE:
            deadline = time.monotonic() + self._graces.failure
            self._tell_to_end(self._graces.failure)
        while not self._crew.collect() and time.monotonic() < deadline:
            time.sleep(_ENDING_POLL_SECONDS)
        if not self._crew.collect():
            self.kill()
        while not self._is_over():
            self._crew.collect()
            time.sleep(_ENDING_POLL_SECONDS)
        self._crew.close()
