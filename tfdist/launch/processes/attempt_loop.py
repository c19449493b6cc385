"""Runs the workers of this host: attempt after attempt, as the run policy decides."""

import contextlib
import signal
import time
from collections.abc import Callable, Mapping, Sequence

from tfdist.launch.processes.control_socket import ControlSocket
from tfdist.launch.processes.heartbeat_monitor import HeartbeatMonitor, MembershipChanges
from tfdist.launch.processes.orphan_reaper import OrphanReaper, child_pids, kill_orphans, memory_directory
from tfdist.launch.processes.output import Console, LogFiles, OutputClosed
from tfdist.launch.processes.run_policy import AttemptStart, RunPolicy
from tfdist.launch.processes.run_status import RunStatus
from tfdist.launch.processes.stop_signals import StopSignals
from tfdist.launch.processes.warm_spares import WarmSpares
from tfdist.launch.processes.worker_group import WorkerGroup
from tfdist.launch.processes.worker_supervisor import WorkerSupervisor
from tfdist.launch.restart.attempt_outcome import Outcome
from tfdist.launch.run_spec import RunSpec
from tfdist.utils.linux_syscalls import become_subreaper


class AttemptLoop:
    """Runs attempts in one thread, the main thread.

    `environments` returns the complete environment of each process of this host, by rank. `warm_spares` is the number
    of processes to keep for workers that are started again. The policy and the logs are closed at the end of the run.
    """

    def __init__(
        self,
        command: Sequence[str],
        environments: Callable[[AttemptStart], Mapping[int, Mapping[str, str]]],
        console: Console,
        logs: LogFiles,
        *,
        policy: RunPolicy,
        spec: RunSpec,
        warm_spares: int = 0,
        control: ControlSocket | None = None,
    ) -> None:
        self._command, self._environments = command, environments
        self._console, self._logs, self._policy, self._spec = console, logs, policy, spec
        self._spare_count, self._control = warm_spares, control
        self._status = RunStatus(spec.workers)
        self._attempt: WorkerSupervisor | None = None
        self._membership: MembershipChanges | None = None  # of all attempts; None: no worker has reported any

    def run(self) -> int:
        """Runs the workers until the policy ends the run.

        Returns:
            The exit code: 0; 75 if all workers were preempted; the exit code of the first failure of the last attempt;
            69 on a host that lost the others; or 128 + the number of the signal that ended the run.
        """
        become_subreaper()
        spared = child_pids()
        self._reaper = OrphanReaper(memory_directory())
        self._spared = {*spared, self._reaper.pid}
        self._spares = WarmSpares(self._command, self._spare_count)
        try:
            with StopSignals(on_repeat=self._kill) as self._signals:
                # Ctrl-C ends all commands of a pipeline. The workers must save even if `tee` is gone.
                self._console.outlive_reader(lambda: bool(self._signals.received))
                while True:
                    start = self._policy.next_attempt(self._signals)
                    if isinstance(start, int):
                        if self._membership is not None:
                            self._console.say(self._membership.describe())
                        return start
                    self._policy.attempt_ended(self._run_attempt(start), self._signals)
        except OutputClosed:
            return 128 + signal.SIGPIPE  # as any command whose reader is gone
        finally:
            self._policy.close()
            self._spares.close()
            self._logs.close()
            self._reaper.close()

    def _run_attempt(self, start: AttemptStart) -> Outcome:
        roles, is_elastic = start.local_roles, self._spec.elastic is not None
        logs = self._logs.open(roles, attempt=start.attempt, joins_late=start.joins_late)
        monitor = HeartbeatMonitor(
            roles,
            now=time.monotonic(),
            heartbeat_timeout_seconds=self._spec.heartbeat_timeout,
            stall_timeout_seconds=self._spec.stall_timeout,
        )
        self._attempt = WorkerSupervisor(
            start,
            self._environments(start),
            self._console,
            logs,
            policy=self._policy,
            group=WorkerGroup(
                self._reaper, self._spares, keeps_spares=start.may_restart or is_elastic, spared=self._spared
            ),
            signals=self._signals,
            monitor=monitor,
            spec=self._spec,
            control=self._control,
        )
        beginning_roles = start.roles if start.beginning is None else start.beginning_roles
        self._status.begin_attempt(start.attempt, beginning_roles, monitor, now=time.monotonic())
        self._console.follow(self._status, now=time.monotonic())
        try:
            return self._attempt.run()
        finally:
            self._attempt = None
            if is_elastic and monitor.membership is not None:
                self._membership = monitor.membership.plus(self._membership or MembershipChanges())
            with contextlib.suppress(OutputClosed):  # if it was closed before, that exception is already raised
                self._console.follow(None, now=time.monotonic())
            kill_orphans(spared=self._spared | self._spares.pids)

    def _kill(self) -> None:
        if self._attempt is not None:
            self._attempt.kill()
