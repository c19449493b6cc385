"""Watches the workers of an attempt: passes their output on, restarts some alone, ends all when another one fails."""

import dataclasses
import signal
import time
from collections.abc import Mapping
from typing import Any, BinaryIO

from tfdist.launch.processes.control_socket import ControlSocket
from tfdist.launch.processes.event_loop import EventLoop
from tfdist.launch.processes.heartbeat_monitor import HeartbeatMonitor
from tfdist.launch.processes.outcome_builder import OutcomeBuilder
from tfdist.launch.processes.output import Console, OutputClosed, WorkerOutput
from tfdist.launch.processes.run_policy import AttemptStart, RunPolicy
from tfdist.launch.processes.stop_signals import StopSignals
from tfdist.launch.processes.worker_group import GroupShutdown, WorkerGroup
from tfdist.launch.processes.worker_process import WorkerProcess
from tfdist.launch.restart.attempt_outcome import Outcome
from tfdist.launch.restart.elastic_workers import ElasticWorkers, describe_too_few
from tfdist.launch.restart.restart_policy import WorkerBackoff
from tfdist.launch.restart.worker_exit import WorkerExit, reports_lost_peer, root_cause
from tfdist.launch.run_spec import RunSpec
from tfdist.utils.formatting import counted, signal_name

_SHUTDOWN_POLL_SECONDS = 0.05
_UNFINISHED_POLL_SECONDS = 0.25
_HEARTBEAT_POLL_SECONDS = 0.25
_NO_PIDFD_POLL_SECONDS = 0.01


class WorkerSupervisor:
    """Starts the workers of this host once, which is an attempt, and watches them until all have ended.

    Everything runs in the main thread: the kernel kills a worker when the *thread* that started it ends, and forking is
    safe only without other threads. The kernel queues the exits of the workers in the order in which they happened
    (epoll, pidfd), so the first failure is the first even if the launcher was suspended. A "worker" is a process of any
    role.
    """

    def __init__(
        self,
        start: AttemptStart,
        environments: Mapping[int, Mapping[str, str]],
        console: Console,
        logs: Mapping[int, BinaryIO | None],
        *,
        policy: RunPolicy,
        group: WorkerGroup,
        signals: StopSignals,
        monitor: HeartbeatMonitor,
        spec: RunSpec,
        control: ControlSocket | None = None,
    ) -> None:
        self._roles, self._environments = start.local_roles, environments
        self._console, self._logs, self._signals = console, logs, signals
        self._grace_periods, self._monitor = spec.grace_periods(may_restart=start.may_restart), monitor
        self._policy, self._policy_fd = policy, policy.descriptor
        restarted_alone = [rank for rank, role in self._roles.items() if role.is_restarted_alone]
        self._backoff = WorkerBackoff(restarted_alone, limit=spec.worker_restarts)
        elastic_ranks = [rank for rank, role in self._roles.items() if role.is_elastic]
        # The coordinator counts the workers of several hosts.
        self._is_one_host, self._least = spec.nodes == 1, spec.elastic or 0
        unwanted = set(elastic_ranks) - start.beginning_roles.keys()
        self._elastic = ElasticWorkers(
            elastic_ranks,
            least=self._least if self._is_one_host else 0,
            late=elastic_ranks if start.joins_late else unwanted,
            unwanted=unwanted,
        )
        self._beginning_ranks, self._control = start.beginning_roles, control
        # When workers of an elastic run are killed that reported an exception or shall leave, and take long, by rank.
        self._exit_deadlines: dict[int, float] = {}
        # The exit after which this host has no worker any more that is restarted alone.
        self._last_restartable: WorkerExit | None = None
        self._group, self._shutdown = group, GroupShutdown(group)
        self._outcome = OutcomeBuilder(start.attempt, self._roles)
        # On a host where no process runs the script, the other hosts decide when the attempt ends.
        self._runs_script = any(role.runs_script for role in self._roles.values())
        self._events = EventLoop(self._read_heartbeats, self._collect)
        # Set if the only failures so far are preemptions, lost peers, or exceptions reported by heartbeat.
        self._patience_until: float | None = None
        self._handled_signals = 0
        self._check_at = 0.0
        self._suspects_freeze = False

    def run(self) -> Outcome:
        """Runs the workers until all have exited. Raises `OutputClosed` if the reader of the output is gone."""
        self._events.watch(self._signals.fd, self._signals.clear_wakeup)
        if self._policy_fd is not None:
            self._events.watch(self._policy_fd, lambda: None)
        if self._control is not None:
            self._control.answer_by(self._answer, self._events)
        try:
            self._start_all()
            self._handle_signals()  # a signal may have come before any worker was started
            while not self._is_over():
                self._step()
            for worker in self._group.workers.values():
                self._events.drain(worker)
        except OutputClosed:
            self._outcome.stop_signal = signal.SIGPIPE
            raise
        finally:
            is_unread = self._outcome.stop_signal == signal.SIGPIPE
            self._shutdown.finish(self._grace_periods.failure if is_unread else 0.0)
            self._events.close()
        return self._outcome.build(self._shutdown.began_at, self._monitor)

    def kill(self) -> None:
        """Kills all workers immediately. A signal handler may call this between any two instructions of `run`."""
        self._shutdown.kill()

    def _is_over(self) -> bool:
        return self._shutdown.is_over() and (not self._may_be_empty or self._shutdown.has_begun)

    @property
    def _may_be_empty(self) -> bool:
        """Whether this host may have no process that runs the script for a while, until its worker is restarted."""
        return not self._runs_script or (self._least > 0 and self._elastic.may_restart)

    def _start_all(self) -> None:
        for rank in self._beginning_ranks:
            if self._signals.received:
                return
            try:
                self._start(rank)
            except OSError as error:
                self._outcome.start_failure = (rank, error)
                self._fail(f"{self._roles[rank].name} could not be started: {error}")
                return

    def _start(self, rank: int) -> None:
        self._backoff.record_start(rank, now=time.monotonic())
        worker = self._group.start(rank, self._environments[rank], self._roles[rank])
        self._monitor.reset(rank)
        self._elastic.record_start(rank, now=time.monotonic())
        self._exit_deadlines.pop(rank, None)
        self._events.add(worker, WorkerOutput(self._roles[rank].label, self._console, self._logs[rank]))

    def _step(self) -> None:
        self._events.wait(self._poll_seconds())
        for worker in self._group.running:
            if worker.pidfd is None:
                self._collect(worker)
        self._events.show_unfinished(now=time.monotonic())
        self._console.show_status(now=time.monotonic())
        self._handle_signals()
        self._poll_policy()
        self._observe_training()
        self._end_waiting_workers()
        self._end_if_complete()
        self._restart_due_workers()
        self._end_without_workers()
        self._group.reap_orphans()
        if not self._shutdown.has_begun:
            self._check_health()
        self._shutdown.kill_if_due()

    def _poll_seconds(self) -> float | None:
        if any(worker.pidfd is None for worker in self._group.running):
            return _NO_PIDFD_POLL_SECONDS
        has_deadline = self._patience_until is not None or self._exit_deadlines or self._elastic.is_complete
        if self._shutdown.has_begun or has_deadline or not self._group.running:
            return _SHUTDOWN_POLL_SECONDS
        if self._monitor.is_enabled or not self._is_one_host:
            return _HEARTBEAT_POLL_SECONDS
        is_pending = self._events.is_pending or self._backoff.is_pending or self._console.has_status_line
        return _UNFINISHED_POLL_SECONDS if is_pending else None

    def _check_health(self) -> None:
        """Ends the attempt if a worker is frozen, the training stalls, or the patience has expired."""
        if time.monotonic() < self._check_at:
            return
        running = self._group.running
        # Heartbeats that arrived while this process was stopped must not count as silence.
        for worker in running:
            self._read_heartbeats(worker)
        now = time.monotonic()
        self._check_at = now + _SHUTDOWN_POLL_SECONDS
        is_stopped = {worker.rank: worker.is_stopped() for worker in running} if self._monitor.is_enabled else {}
        health = self._monitor.check(is_stopped, now=now)
        self._console.say(*health.messages)
        for rank, reason in health.frozen.items():
            self._outcome.record_frozen(rank, reason)
            if not self._roles[rank].is_restarted_alone:
                self._console.say(f"{self._roles[rank].name} is frozen: {reason}")
            self._group.workers[rank].send_signal(signal.SIGKILL)  # it would not handle any other
        for rank, deadline in self._exit_deadlines.items():
            if now >= deadline:
                self._group.workers[rank].send_signal(signal.SIGKILL)
        frozen = self._outcome.frozen
        # Once a worker has ended with 0, the others may have no step left.
        stall = self._outcome.stall = "" if frozen or self._elastic.is_complete else health.stall
        if stall:
            self._console.say(stall)
        needed = {rank: stopped for rank, stopped in is_stopped.items() if self._roles[rank].may_be_the_cause}
        self._suspects_freeze = self._monitor.suspects_freeze(needed)
        is_patient = self._patience_until is None or now < self._patience_until or self._suspects_freeze
        must_save = bool(self._outcome.too_few) and self._outcome.is_preempted
        if frozen or stall:
            self._fail(stall or "; ".join(f"{name} is frozen" for name in frozen))
        elif not is_patient:
            if not self._policy.report_lost_peer(self._outcome.describe()):
                self._shutdown.terminate(self._grace_periods.stop if must_save else self._grace_periods.failure)
        elif self._monitor.is_training:
            self._group.prepare_spare(next(iter(self._environments.values())))

    def _read_heartbeats(self, worker: WorkerProcess) -> None:
        errors_before = len(self._monitor.errors)
        for datagram in worker.read_heartbeats():
            self._monitor.receive(worker.rank, datagram, now=time.monotonic())
        role, has_error = self._roles[worker.rank], len(self._monitor.errors) > errors_before
        # Its interpreter may take long to exit. Neither it nor the others should wait for that.
        if has_error and role.is_elastic:
            self._exit_deadlines[worker.rank] = time.monotonic() + self._grace_periods.patience
        elif has_error and not role.is_restarted_alone and self._patience_until is None:
            is_lost_peer = reports_lost_peer(" ".join(self._monitor.errors[worker.rank].values()))
            patience = self._grace_periods.patience if is_lost_peer else self._grace_periods.failure
            self._patience_until = time.monotonic() + patience

    def _collect(self, worker: WorkerProcess) -> None:
        """Reaps a worker and handles its exit."""
        returncode = worker.reap()
        if returncode is None:
            return
        self._read_heartbeats(worker)
        lines, all_signalled = self._events.finish(worker), self._shutdown.all_signalled
        worker_exit = self._outcome.worker_exit(worker, returncode, lines, all_signalled=all_signalled)
        if self._roles[worker_exit.rank].is_elastic:
            self._record_elastic_exit(worker, worker_exit)
            self._end_if_complete()
            return
        if self._roles[worker_exit.rank].is_restarted_alone and not all_signalled:
            worker.send_signal(signal.SIGKILL)  # to the children that it left behind
            self._record_restartable_exit(worker_exit)
            self._end_without_workers()
            return
        self._outcome.exits.append(worker_exit)
        if worker_exit.failed and not self._shutdown.has_begun:
            self._handle_failure(worker_exit)
        self._end_if_complete()

    def _handle_failure(self, worker_exit: WorkerExit) -> None:
        if worker_exit.is_preempted:
            # The other workers save, too. A second signal now would end them immediately.
            self._console.say(f"{worker_exit.name} was preempted: it saved and exited ({worker_exit.describe()})")
            self._patience_until = self._patience_until or time.monotonic() + self._grace_periods.stop
            return
        self._console.say(f"{worker_exit.name} failed: {worker_exit.describe()}")
        if not worker_exit.reports_lost_peer:
            self._fail(f"{worker_exit.name}: {worker_exit.describe()}")
        elif self._patience_until is None:
            # The peer that it lost may still be about to report the root cause, and must not be signalled before.
            self._patience_until = time.monotonic() + self._grace_periods.patience

    def _record_restartable_exit(self, ended: WorkerExit) -> None:
        """Says what follows the exit of a worker that is restarted alone, or that it could not be started."""
        has_others = self._policy.has_other_workers
        follows = self._backoff.record_exit(ended.rank, now=time.monotonic(), has_others=has_others)
        self._console.say(f"{ended.name} {'failed' if ended.failed else 'ended'}: {ended.describe()}; {follows}")
        if self._backoff.is_exhausted:
            self._last_restartable = ended
            self._policy.report_no_worker()

    def _record_elastic_exit(self, worker: WorkerProcess, ended: WorkerExit) -> None:
        """Decides and says what follows the exit of a worker of an elastic run."""
        self._exit_deadlines.pop(ended.rank, None)
        self._observe_training()
        is_complete = not ended.failed and ended.returncode == 0
        is_unneeded = self._elastic.is_waiting(ended.rank) and not ended.is_preempted and not is_complete
        if self._shutdown.all_signalled or is_complete:
            if not is_unneeded:
                self._outcome.exits.append(ended)
            if is_complete and not self._shutdown.all_signalled:
                self._complete_elastic(ended)
            return
        worker.send_signal(signal.SIGKILL)  # to the children that it left behind
        if not self._elastic.is_wanted(ended.rank) or self._elastic.is_leaving(ended.rank):
            self._record_departure(ended)
        elif self._elastic.is_complete and is_unneeded:
            self._console.say(f"{ended.name} ended: {ended.describe()}; the training has ended without it")
        elif not self._elastic.may_restart:
            self._outcome.exits.append(ended)
            if not self._shutdown.has_begun:
                self._handle_failure(ended)
        else:
            self._record_loss(ended)

    def _complete_elastic(self, ended: WorkerExit) -> None:
        self._policy.report_completion()
        self._record_completion(ended.name)

    def _record_completion(self, name: str) -> None:
        self._elastic.record_completion(now=time.monotonic())
        for rank in self._backoff.cancel():
            self._console.say(f"{self._roles[rank].name} is not restarted: {name} has ended with exit code 0")

    def _record_loss(self, ended: WorkerExit) -> None:
        """Restarts a worker alone, or ends the attempt if too few are left."""
        now = time.monotonic()
        is_enough = self._elastic.record_exit(ended, now=now)
        if is_enough:
            follows = self._backoff.record_exit(ended.rank, now=now, has_others=True)
        else:
            too_few = describe_too_few(self._elastic.count(now=now), self._least)
            follows = f"the attempt ends: {too_few}"
        if ended.is_preempted:
            self._console.say(f"{ended.name} left, as it was asked to: {ended.describe()}; {follows}")
        else:
            # The launcher signals a single worker that is not frozen only because of an error that it has reported.
            what = "an error, while it was still shutting down" if ended.was_signalled else ended.describe()
            self._console.say(f"{ended.name} failed: {what}; {follows}")
        if not is_enough:
            self._end_with_too_few(too_few)

    def _record_departure(self, ended: WorkerExit) -> None:
        """Says that a worker has ended that was asked to leave. It starts again if it is wanted again."""
        was_enough, now = self._elastic.may_restart, time.monotonic()
        is_enough = self._elastic.record_exit(ended, now=now)
        if self._elastic.is_wanted(ended.rank) and self._elastic.may_restart:
            self._backoff.restart_now(ended.rank, now=now)
            self._console.say(
                f"{ended.name} left, as it was asked to: {ended.describe()}; it starts again, as requested"
            )
        else:
            self._console.say(f"{ended.name} left, as it was asked to: {ended.describe()}; it is not restarted")
        if was_enough and not is_enough:
            self._end_with_too_few(describe_too_few(self._elastic.count(now=now), self._least))

    def _answer(self, request: Mapping[str, Any]) -> dict[str, str]:
        """Starts workers, or asks some to leave, as `tfdist resize` requests; returns the answer."""
        count, most = request.get("workers"), len(self._roles)
        if type(count) is not int or not self._least <= count <= most:
            expected = f"{self._least} to {most}, as --elastic of the run says"
            return {"error": f"The number of workers is out of range. Received: {count}. Expected: {expected}."}
        if self._shutdown.has_begun or not self._elastic.may_restart:
            return {"error": f"The run is ending. Received: {counted(count, 'worker')}. Expected: a run that trains."}
        if count < self._elastic.wanted_count and not self._monitor.has_begun:
            return {
                "error": f"The training has not begun. Received: {counted(count, 'worker')}. Expected: at least "
                f"{self._elastic.wanted_count}, because the workers that begin wait for one another. Ask again when "
                "they have made a step."
            }
        now = time.monotonic()
        starts, leaves = self._elastic.resize(count, now=now)
        self._monitor.resized_to = count
        self._backoff.cancel(leaves)
        for worker in self._group.running:
            if worker.rank in leaves and worker.rank not in self._exit_deadlines:  # a second signal would end it
                worker.send_signal(signal.SIGTERM)
                self._exit_deadlines[worker.rank] = now + self._grace_periods.stop
        changes = [
            f"{self._roles[rank].name} {'leaves' if rank in leaves else 'starts'}" for rank in [*starts, *leaves]
        ]
        text = f"{counted(count, 'worker')} from now on: {', '.join(changes) or 'as before'}"
        self._console.say(text)
        for rank in set(starts) - {worker.rank for worker in self._group.running}:
            self._start_again(rank)  # the others start when they have left
        return {"text": text}

    def _end_with_too_few(self, too_few: str) -> None:
        self._outcome.too_few = too_few
        self._backoff.cancel()
        self._outcome.exits += self._elastic.recent_exits
        cause = root_cause(self._outcome.exits)
        has_cause = cause is not None and not (cause.is_preempted or cause.reports_lost_peer)
        if has_cause or (cause is None and self._is_one_host):
            self._fail(too_few)
        elif self._is_one_host:  # on several, the coordinator is patient
            # The root cause may still follow, or others that were asked to leave, too, save.
            self._patience_until = time.monotonic() + self._grace_periods.patience

    def _observe_training(self) -> None:
        if not self._least:
            return
        step = self._monitor.step
        progress = self._monitor.fit, -1 if step is None else step
        for rank in self._elastic.observe(self._monitor.trained_ranks, progress, now=time.monotonic()):
            self._console.say(f"{self._roles[rank].name} has joined the others")
        failures = [worker for worker in self._elastic.recent_exits if not worker.is_preempted]
        self._policy.report_training(
            self._elastic.count(now=time.monotonic()), has_failure=bool(failures), living=self._monitor.training
        )

    def _end_waiting_workers(self) -> None:
        """Ends workers that were restarted and have not joined the others before these have ended."""
        number = self._elastic.signal_to_waiting(self._grace_periods.patience, now=time.monotonic())
        if number is None:
            return
        for worker in self._group.running:
            if self._elastic.is_waiting(worker.rank) and number not in worker.signals_sent:
                worker.send_signal(number)

    def _end_without_workers(self) -> None:
        """Ends the attempt, once, if no worker that is restarted alone is left on any host."""
        last_exit = self._last_restartable
        if last_exit is None or self._policy.has_other_workers:
            return
        self._last_restartable = None
        if not self._shutdown.all_signalled:
            reason = f"{last_exit.describe()}; {self._backoff.none_left}"
            last_exit = dataclasses.replace(last_exit, failure_reason=reason, was_signalled=False)
            self._outcome.exits.append(last_exit)
            self._fail(f"{last_exit.name}: {last_exit.failure_reason}")

    def _restart_due_workers(self) -> None:
        # Once no process runs the script any more, nobody needs a restarted worker.
        if self._shutdown.all_signalled or not (self._may_be_empty or self._group.runs_script):
            return
        for rank in self._backoff.due(now=time.monotonic()):
            self._start_again(rank)

    def _start_again(self, rank: int) -> None:
        """Starts a worker while the others train."""
        if rank in self._group.workers:
            self._events.remove(self._group.workers[rank])
        try:
            self._start(rank)
        except OSError as error:
            reason = f"it could not be started ({error})"
            ended = WorkerExit(rank, 1, failure_reason=reason, task=self._roles[rank].name)
            (self._record_loss if self._roles[rank].is_elastic else self._record_restartable_exit)(ended)

    def _end_if_complete(self) -> None:
        """Ends the rest when no process runs the script any more: servers, or children that workers left behind."""
        if self._shutdown.all_signalled or self._group.runs_script or self._may_be_empty:
            return
        running = self._group.running
        if running and not self._shutdown.has_begun and self._outcome.reports_lost_peer:
            return  # the lost peer may soon be found
        self._shutdown.terminate(self._grace_periods.patience if running else self._grace_periods.failure)

    def _handle_signals(self) -> None:
        received = self._signals.received
        if len(received) == self._handled_signals:
            return
        self._handled_signals = len(received)
        if self._outcome.stop_signal is None and not self._outcome.is_failing:
            self._outcome.stop_signal = received[0]
        if self._shutdown.has_killed:
            self.kill()  # workers that were being started when the signal was repeated
        elif not self._shutdown.has_begun:
            self._console.say(
                f"{signal_name(received[0])}: ending the workers (SIGTERM, after {self._grace_periods.stop:g} s "
                "SIGKILL; at once if it comes again)"
            )
            # The processes that run the script need the others to save.
            self._shutdown.terminate(self._grace_periods.stop, only_script=True)
        else:
            self._console.say(f"{signal_name(received[-1])}: already ending the workers (SIGKILL if it comes again)")

    def _poll_policy(self) -> None:
        self._policy.report_signals(self._signals.received)
        self._policy.poll(suspects_freeze=self._suspects_freeze)
        if (descriptor := self._policy.descriptor) != self._policy_fd:
            if self._policy_fd is not None:
                self._events.unwatch(self._policy_fd)
            if descriptor is not None:
                self._events.watch(descriptor, lambda: None)
            self._policy_fd = descriptor
        if self._policy.has_completed and not self._elastic.is_complete:
            self._record_completion("a worker of another host")
        if self._policy.too_few and self._elastic.may_restart:
            self._elastic.fail()
            self._end_with_too_few(self._policy.too_few)
        order = self._policy.shutdown_order
        if order is None:
            return
        if not self._shutdown.has_begun:
            self._console.say(f"ending the workers: {order.reason}")
            self._outcome.stop_signal = order.stop_signal
        if not self._shutdown.has_begun or not (order.only_script or self._shutdown.all_signalled):
            is_failure = order.stop_signal is None and not order.must_save
            grace_seconds = self._grace_periods.failure if is_failure else self._grace_periods.stop
            self._shutdown.terminate(grace_seconds, only_script=order.only_script)
        if order.kill and not self._shutdown.has_killed:
            self.kill()

    def _fail(self, reason: str) -> None:
        self._policy.report_failure(reason)
        self._shutdown.terminate(self._grace_periods.failure)
