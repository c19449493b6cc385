"""The interface between the supervisor and what decides about its attempts, and the policy of a run on one host."""

import abc
import dataclasses
import select
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from tfdist.launch.processes.stop_signals import StopSignals
from tfdist.launch.restart.attempt_outcome import ErrorFile, Outcome
from tfdist.launch.restart.restart_policy import AttemptEvaluator
from tfdist.launch.run_spec import Role, RunSpec
from tfdist.utils.cores_and_ports import ReservedPorts


@dataclasses.dataclass(frozen=True)
class AttemptStart:
    """The processes to start in an attempt."""

    attempt: int  # number of the attempt, 0 first
    roles: Mapping[int, Role]  # the processes of all hosts, by rank
    local_ranks: Sequence[int]  # ranks of the processes of this host
    addresses: tuple[str, ...]  # `host:port` of the processes of all hosts, by rank
    full_workers: int  # number of workers that were requested, on all hosts together
    run_id: str  # identifies the run
    seed: int  # the seed of the run
    may_restart: bool = False  # whether a failure may be followed by a restart
    beginning: int | None = None  # how many elastic workers begin, those of the lowest ranks; None: all
    joins_late: bool = False  # whether the workers of other hosts train already, and those of this one join them

    @property
    def local_roles(self) -> dict[int, Role]:
        return {rank: self.roles[rank] for rank in self.local_ranks}

    @property
    def beginning_roles(self) -> dict[int, Role]:
        """The processes of this host that begin."""
        return dict(list(self.local_roles.items())[: self.beginning])


@dataclasses.dataclass(frozen=True)
class ShutdownOrder:
    """The decision that all hosts end their workers."""

    reason: str  # message for the user
    stop_signal: int | None = None  # the signal that one of the supervisors received; None after a failure
    kill: bool = False  # whether to kill the workers immediately
    only_script: bool = False  # whether to end only processes that run the script, which may need the others to save
    must_save: bool = False  # whether workers have the time to save, although this is no signal

    def as_message(self) -> dict[str, Any]:
        return {
            "reason": self.reason,
            "signal": self.stop_signal,
            "kill": self.kill,
            "only_script": self.only_script,
            "must_save": self.must_save,
        }


class RunPolicy(Protocol):
    """Decides when the attempts of a host start, when they must end, and what follows.

    The supervisor calls `next_attempt`, runs the attempt, calls `attempt_ended`, and repeats. The other methods
    exchange messages with other hosts while an attempt runs; by default there are no other hosts.
    """

    shutdown_order: ShutdownOrder | None = None  # whether and why the workers of the present attempt must end
    too_few: str = ""  # how many workers of all hosts are left in an elastic attempt, if too few, or an empty string
    has_completed: bool = False  # whether an elastic worker of another host has ended with 0 in this attempt

    @abc.abstractmethod
    def next_attempt(self, signals: StopSignals) -> AttemptStart | int:
        """Waits until the next attempt may start, or the run ends; then returns the exit code of `tfdist run`."""

    @abc.abstractmethod
    def attempt_ended(self, outcome: Outcome, signals: StopSignals) -> None:
        """Takes the outcome of the attempt on this host. Raises an OSError if no worker could be started at all."""

    @property
    def descriptor(self) -> int | None:
        """A file descriptor that becomes readable when another host sends a message, or None."""
        return None

    def poll(self, *, suspects_freeze: bool) -> None:
        """Receives and sends messages. Called several times a second while an attempt runs."""
        return

    def report_signals(self, received: Sequence[int]) -> None:
        """Reports the signals that this supervisor has received so far. Each is sent once."""
        return

    def report_failure(self, text: str) -> None:
        """Reports a failure that was not caused by another worker's."""
        return

    def report_lost_peer(self, text: str) -> bool:
        """Reports a worker that failed because it lost a peer; returns whether the other hosts decide what follows."""
        return False

    @property
    def has_other_workers(self) -> bool:
        """Whether other hosts have workers with which the training continues."""
        return False

    def report_no_worker(self) -> None:
        """Reports that no worker of this host is left that is restarted alone."""
        return

    def report_training(self, count: int, *, has_failure: bool, living: int | None) -> None:
        """Reports how many elastic workers of this host train. Called several times a second.

        `has_failure` says whether one was lost, and was not asked to leave. `living` is how many of all hosts train, as
        the workers of this host have reported last, or None.
        """
        return

    def report_completion(self) -> None:
        """Reports that an elastic worker of this host has ended with 0."""
        return

    def close(self) -> None:
        """Leaves the run."""
        return


class SingleNodePolicy(RunPolicy):
    """The policy of a run on one host: restarts as `AttemptEvaluator` decides."""

    def __init__(self, spec: RunSpec, *, error_file: ErrorFile, say: Callable[..., None]) -> None:
        self._spec, self._error_file, self._say = spec, error_file, say
        self._evaluator = AttemptEvaluator(spec, spec.workers)
        self._workers = spec.workers
        self._attempt = 0
        self._not_before = 0.0
        self._exit_code: int | None = None  # None: the run has not ended

    def next_attempt(self, signals: StopSignals) -> AttemptStart | int:
        if self._exit_code is not None:
            return self._exit_code
        if self._attempt > 0:
            while (seconds_left := self._not_before - time.monotonic()) > 0 and not signals.received:
                select.select([signals.fd], [], [], seconds_left)
                signals.clear_wakeup()
            if signals.received:
                return 128 + signals.received[0]
        most = self._spec.most_workers
        roles = self._spec.roles(most or self._workers)
        with ReservedPorts(len(roles)) as reserved:
            addresses = tuple(f"127.0.0.1:{port}" for port in reserved.ports)
        return AttemptStart(
            self._attempt,
            roles,
            tuple(roles),
            addresses,
            self._spec.workers,
            self._spec.run_id,
            self._spec.run_seed,
            self._evaluator.may_restart,
            beginning=None if most is None else self._spec.workers,
        )

    def attempt_ended(self, outcome: Outcome, signals: StopSignals) -> None:
        is_stopped = bool(signals.received)
        if outcome.start_failure is not None and outcome.attempt == 0 and not is_stopped:
            raise outcome.start_failure[1]
        evaluation = self._evaluator.evaluate(outcome, is_stopped=is_stopped)
        problem = "" if evaluation.error_entry is None else self._error_file.write(evaluation.error_entry)
        self._say(*([problem] if problem else []), *evaluation.lines)
        self._exit_code = evaluation.exit_code
        self._attempt += 1
        self._workers = evaluation.workers
        self._not_before = outcome.failed_at + evaluation.delay_seconds
