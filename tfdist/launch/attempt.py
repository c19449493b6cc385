"""One start of all workers: passes their output on, watches them, and ends all of them when one fails."""

import dataclasses
import signal
import time
from collections.abc import Mapping, Sequence
from typing import BinaryIO

from tfdist.launch.channels import Channels
from tfdist.launch.crew import Crew
from tfdist.launch.ending import Ending
from tfdist.launch.failure import WorkerEnd, signal_name, tells_of_a_lost_peer
from tfdist.launch.findings import Findings
from tfdist.launch.limits import Graces
from tfdist.launch.liveness import Liveness
from tfdist.launch.others import Alone, Others
from tfdist.launch.outcome import Outcome
from tfdist.launch.output import Console, OutputClosed, WorkerOutput
from tfdist.launch.replacements import Replacements
from tfdist.launch.roles import Role
from tfdist.launch.stop_signals import StopSignals
from tfdist.launch.worker_process import WorkerProcess

_ENDING_POLL_SECONDS = 0.05
_UNFINISHED_POLL_SECONDS = 0.25
_LIVENESS_POLL_SECONDS = 0.25
_NO_PIDFD_POLL_SECONDS = 0.01


class Attempt:
    """One start of the workers of this host.

    All of it happens in one thread, the main thread: the kernel kills a worker when the *thread* that started it ends,
    and a fork is safe only without others. The kernel queues the ends of the workers in the order in which they
    happened (epoll, pidfd), so the first failure is the first even when the launcher slept.

    Args:
        number: Which attempt it is, 0 first.
        roles: What each process is. What is said of workers here is true of processes of all roles.
        environments: The whole environment of each worker, by rank.
        console: Where output and messages go.
        logs: A log file for each worker, or None.
        replacements: When workers that are started again alone are.
        crew: Starts the workers.
        signals: Those that end the run.
        graces: How long workers are given.
        liveness: Takes their heartbeats.
        first_rank: The rank of the first of them.
        others: The other hosts of the run.
    """

    def __init__(
        self,
        number: int,
        roles: Sequence[Role],
        environments: Sequence[Mapping[str, str]],
        console: Console,
        logs: Sequence[BinaryIO | None],
        *,
        replacements: Replacements,
        crew: Crew,
        signals: StopSignals,
        graces: Graces,
        liveness: Liveness,
        first_rank: int = 0,
        others: Others | None = None,
    ) -> None:
        self._environments, self._roles = environments, dict(enumerate(roles, first_rank))
        self._console, self._logs, self._signals = console, logs, signals
        self._graces, self._liveness = graces, liveness
        self._first_rank = first_rank
        self._others: Others = Alone() if others is None else others
        self._others_fd = self._others.descriptor
        self._crew, self._replacements = crew, replacements
        self._ending, self._findings = Ending(crew), Findings(number, self._roles)
        self._channels = Channels(self._hear)
        self._patience_until: float | None = None  # set: the only failures so far are echoes
        self._heeded_signals = 0
        self._judge_at = 0.0
        self._suspects = False  # a worker is silent for so long that it may be about to be found frozen

    def run(self) -> Outcome:
        """Runs the workers until all are gone.

        Raises:
            OutputClosed: If nobody reads the output any more.
        """
        self._channels.watch(self._signals.fd, self._signals.clear_wakeup)
        if self._others_fd is not None:
            self._channels.watch(self._others_fd, lambda: None)
        try:
            self._start()
            self._heed_signals()  # none may have been started
            while not self._ending.is_over():
                self._step()
            for worker in self._crew.workers:
                self._channels.drain(worker)
        except OutputClosed:
            self._findings.stop_signal = signal.SIGPIPE
            raise
        finally:
            is_unread = self._findings.stop_signal == signal.SIGPIPE
            self._ending.end_silently(self._graces.failure if is_unread else 0.0)
            self._channels.close()
        return self._findings.outcome(self._ending.began_at, self._liveness)

    def kill(self) -> None:
        """Kills all workers at once. It may be called between any two instructions of `run`."""
        self._ending.kill()

    def _start(self) -> None:
        for rank in self._roles:
            if self._signals.received:
                return
            try:
                self._hire(rank)
            except OSError as error:
                self._findings.unstarted = (rank, error)
                self._fail(f"{self._roles[rank].name} could not be started: {error}")
                return

    def _hire(self, rank: int) -> None:
        self._replacements.note_start(rank, now=time.monotonic())
        place = rank - self._first_rank
        worker = self._crew.hire(rank, self._environments[place], self._roles[rank])
        self._liveness.forget(rank)
        self._channels.add(worker, WorkerOutput(self._roles[rank].label, self._console, self._logs[place]))

    def _step(self) -> None:
        self._channels.wait(self._poll_seconds(), self._collect)
        for worker in self._crew.running:
            if worker.pidfd is None:
                self._collect(worker)
        self._channels.show_unfinished(now=time.monotonic())
        self._console.show_status(now=time.monotonic())
        self._heed_signals()
        self._heed_others()
        self._end_what_is_through()
        self._replace()
        self._crew.collect_orphans()
        if not self._ending.has_begun:
            self._judge()
        self._ending.kill_in_time()

    def _poll_seconds(self) -> float | None:
        if any(worker.pidfd is None for worker in self._crew.running):
            return _NO_PIDFD_POLL_SECONDS
        if self._ending.has_begun or self._patience_until is not None or not self._crew.running:
            return _ENDING_POLL_SECONDS
        if self._liveness.is_judging or self._others_fd is not None:
            return _LIVENESS_POLL_SECONDS
        is_pending = self._channels.is_pending or self._replacements.is_pending or self._console.is_live
        return _UNFINISHED_POLL_SECONDS if is_pending else None

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
            self._findings.freeze(rank, reason)
            if not self._roles[rank].is_replaced:
                self._console.say(f"{self._roles[rank].name} is frozen: {reason}")
            self._crew.workers[rank - self._first_rank].tell(signal.SIGKILL)  # it would hear nothing else
        frozen = self._findings.frozen
        stall = self._findings.stall = "" if frozen else judgement.stall
        if stall:
            self._console.say(stall)
        is_stopped = {rank: stopped for rank, stopped in is_stopped.items() if not self._roles[rank].is_replaced}
        self._suspects = self._liveness.suspects(is_stopped)
        is_patient = self._patience_until is None or now < self._patience_until or self._suspects
        if frozen or stall:
            self._fail(stall or "; ".join(f"{name} is frozen" for name in frozen))
        elif not is_patient:
            self._end_of_patience()
        elif self._liveness.is_training:
            self._crew.prepare_next(self._environments[0])

    def _hear(self, worker: WorkerProcess) -> None:
        knew = len(self._liveness.errors)
        for datagram in worker.heard():
            self._liveness.hear(worker.rank, datagram, now=time.monotonic())
        if self._roles[worker.rank].is_replaced:
            return
        if len(self._liveness.errors) > knew and self._patience_until is None:
            # Its interpreter may take long to end. The others are not to wait for that, nor it for them.
            is_echo = tells_of_a_lost_peer(" ".join(self._liveness.errors[worker.rank].values()))
            self._patience_until = time.monotonic() + (self._graces.patience if is_echo else self._graces.failure)

    def _collect(self, worker: WorkerProcess) -> None:
        returncode = worker.reap()
        if returncode is None:
            return
        self._hear(worker)
        lines, are_all_told = self._channels.finish(worker), self._ending.are_all_told
        end = self._findings.end_of(worker, returncode, lines, are_all_told=are_all_told)
        if self._roles[end.rank].is_replaced and not are_all_told:
            worker.tell(signal.SIGKILL)  # what it has left behind
            self._lose(end)
            return
        self._findings.ends.append(end)
        if end.failed and not self._ending.has_begun:
            self._weigh(end)
        self._end_what_is_through()

    def _weigh(self, end: WorkerEnd) -> None:
        if end.is_preempted:
            # The others are saving, too. A signal now would be their second, which ends them at once.
            self._console.say(f"{end.name} was preempted: it saved and left ({end.describe()})")
            self._patience_until = self._patience_until or time.monotonic() + self._graces.stop
            return
        self._console.say(f"{end.name} failed: {end.describe()}")
        if not end.is_echo:
            self._fail(f"{end.name}: {end.describe()}")
        elif self._patience_until is None:
            # It only tells that a peer is gone. Told to end now, that peer could not say any more why.
            self._patience_until = time.monotonic() + self._graces.patience

    def _lose(self, end: WorkerEnd) -> None:
        """Goes on without a worker that is started again alone."""
        how, follows = end.describe(), self._replacements.after_end(end.rank, now=time.monotonic())
        self._console.say(f"{end.name} {'failed' if end.failed else 'ended'}: {how}; {follows}")
        if self._replacements.are_used_up:
            self._findings.ends.append(dataclasses.replace(end, verdict=f"{how}; {follows}", was_told=False))
            self._fail(f"{end.name}: {how}; {follows}")

    def _replace(self) -> None:
        if self._ending.are_all_told or not self._crew.runs_script:
            return
        for rank in self._replacements.due(now=time.monotonic()):
            self._channels.remove(self._crew.workers[rank - self._first_rank])
            try:
                self._hire(rank)
            except OSError as error:
                self._lose(
                    WorkerEnd(rank, 1, verdict=f"it could not be started ({error})", task=self._roles[rank].name)
                )

    def _end_what_is_through(self) -> None:
        """Ends what is left once no process runs the script any more: servers, or what the workers left behind."""
        if self._ending.are_all_told or self._crew.runs_script:
            return
        running = self._crew.running
        if running and not self._ending.has_begun and self._findings.is_echo:
            return  # who is lost may be about to be seen
        self._ending.tell(self._graces.patience if running else self._graces.failure)

    def _heed_signals(self) -> None:
        received = self._signals.received
        if len(received) == self._heeded_signals:
            return
        self._heeded_signals = len(received)
        if self._findings.stop_signal is None and not self._findings.is_failing:
            self._findings.stop_signal = received[0]
        if self._ending.has_killed:
            self.kill()  # those that were being started when the signal came again
        elif not self._ending.has_begun:
            self._console.say(
                f"{signal_name(received[0])}: ending the workers (SIGTERM, after {self._graces.stop:g} s SIGKILL; at "
                "once if it comes again)"
            )
            self._ending.tell(self._graces.stop, only_script=True)  # which needs the others to save
        else:
            self._console.say(
                f"{signal_name(received[-1])}: the workers are being ended already (SIGKILL if it comes again)"
            )

    def _heed_others(self) -> None:
        self._others.tell_stop(self._signals.received)
        self._others.exchange(suspects=self._suspects)
        if self._others.descriptor is None and self._others_fd is not None:
            self._channels.forget(self._others_fd)
            self._others_fd = None
        order = self._others.order
        if order is None:
            return
        if not self._ending.has_begun:
            self._console.say(f"ending the workers: {order.reason}")
            self._findings.stop_signal = order.stop_signal
            self._ending.tell(self._graces.failure if order.stop_signal is None else self._graces.stop)
        if order.kill and not self._ending.has_killed:
            self.kill()

    def _fail(self, reason: str) -> None:
        self._others.tell_failure(reason)
        self._ending.tell(self._graces.failure)

    def _end_of_patience(self) -> None:
        if not self._others.tell_echo(self._findings.describe()):
            self._ending.tell(self._graces.failure)
