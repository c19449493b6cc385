"""How a worker exited, and which of several failures is the root cause."""

import dataclasses
import re
import signal
from collections.abc import Sequence

from tfdist.cluster import PREEMPTED_EXIT_CODE
from tfdist.utils.formatting import signal_name

_SHOWN_LINES = 20
_TRACEBACK = "Traceback (most recent call last):"
_LOST_PEER = re.compile(
    r"WorkerLostError|Worker \d+ is lost|ExcludedWorkerError|NoMajorityError|"
    r"UnavailableError|Connection reset by peer|Error received from peer|Socket closed|failed to connect to all "
    r"addresses|heartbeat timeout|CoordinationServiceError|Failed to send RPC to coordination service|coordination "
    r"service encountered an error|Coordination agent is set to error"
)
_SIGNALS_OF_A_CRASH = frozenset(
    {signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV, signal.SIGSYS, signal.SIGTRAP}
)
_INFORMATION = re.compile(r"[-\d]+ [\d:.]+: I |I\d{4} ")  # how TensorFlow marks it in its log
_EXCEPTION = re.compile(r"([A-Za-z_][\w.]*)(?::|$)")


@dataclasses.dataclass(frozen=True)
class WorkerExit:
    """How one worker exited."""

    rank: int  # rank of the worker
    returncode: int  # its exit code, or minus the number of the signal that killed it
    last_lines: tuple[str, ...] = ()  # its last lines of output, both streams
    was_signalled: bool = False  # whether the launcher sent it a signal before it exited
    failure_reason: str = ""  # why the launcher judged it failed, for example "frozen: no heartbeat for 10 s"; or empty
    at: float = 0.0  # time of the exit, in seconds since 1970
    task: str = ""  # its name in messages where that is not the rank, for example "ps 0"; or empty
    host: str = ""  # name of its host in a run on several hosts; or empty

    @property
    def name(self) -> str:
        """Its name in messages.

        >>> WorkerExit(3, 1).name, WorkerExit(3, 1, host="b").name, WorkerExit(3, 1, task="ps 0").name
        ('worker 3', 'worker 3 on b', 'ps 0')
        """
        name = self.task or f"worker {self.rank}"
        return f"{name} on {self.host}" if self.host else name

    @property
    def failed(self) -> bool:
        """Whether the launcher judged it failed, or it exited with another code than 0 without a signal."""
        return bool(self.failure_reason) or (self.returncode != 0 and not self.was_signalled)

    @property
    def is_preempted(self) -> bool:
        """Whether it saved and exited after a preemption signal, whoever sent it."""
        return self.returncode == PREEMPTED_EXIT_CODE

    @property
    def exit_code(self) -> int:
        """The exit code as a shell shows it: 128 + number for a signal."""
        return self.returncode if self.returncode >= 0 else 128 - self.returncode

    @property
    def is_killed_from_outside(self) -> bool:
        """Whether a signal ended it that its own code does not cause, as a fault of memory or an abort does.

        >>> WorkerExit(0, -9).is_killed_from_outside, WorkerExit(0, -11).is_killed_from_outside
        (True, False)
        """
        return self.returncode < 0 and -self.returncode not in _SIGNALS_OF_A_CRASH and not self.failure_reason

    @property
    def reports_lost_peer(self) -> bool:
        """Whether its last lines report a lost peer, so that the root cause is likely elsewhere."""
        # TensorFlow itself may abort when a peer is lost during a collective.
        was_killed = self.returncode < 0 and self.returncode != -signal.SIGABRT
        return not was_killed and reports_lost_peer("\n".join(self._error_lines()))

    @property
    def has_own_error(self) -> bool:
        """Whether its last lines are a traceback that does not report a lost peer, even if it was signalled."""
        return _TRACEBACK in self.last_lines and not reports_lost_peer("\n".join(self._error_lines()))

    @property
    def exception(self) -> str:
        """Type of the exception that it printed last, or an empty string."""
        if _TRACEBACK not in self.last_lines:
            return ""
        matches = (_EXCEPTION.match(line) for line in self._error_lines()[1:])
        return next((match[1] for match in matches if match), "")

    def describe(self) -> str:
        """Returns how it exited.

        >>> WorkerExit(1, 3).describe(), WorkerExit(1, -11).describe()
        ('exit code 3', 'killed by SIGSEGV')
        """
        if self.failure_reason:
            return self.failure_reason
        if self.returncode >= 0:
            return f"exit code {self.returncode}"
        is_unexplained = self.returncode == -signal.SIGKILL and not self.was_signalled
        hint = " (possibly the OOM killer)" if is_unexplained else ""
        return f"killed by {signal_name(-self.returncode)}{hint}"

    def report(self) -> list[str]:
        """Returns lines that present it as the root cause of the failure."""
        how = self.describe()
        if self.was_signalled and not self.failure_reason:
            how = "an error, while it was still shutting down"
        if not self.last_lines:
            return [f"{self.name} failed first: {how}. It printed nothing."]
        shown = self.last_lines[-_SHOWN_LINES:]
        return [f"{self.name} failed first: {how}. Its last lines:", *(f"  | {line}" for line in shown)]

    def _error_lines(self) -> tuple[str, ...]:
        starts = [i for i, line in enumerate(self.last_lines) if line.startswith(_TRACEBACK)]
        lines = self.last_lines[starts[-1] :] if starts else self.last_lines[-_SHOWN_LINES:]
        return tuple(line for line in lines if not _INFORMATION.match(line))


def root_cause(exits: Sequence[WorkerExit]) -> WorkerExit | None:
    """Returns the failure that caused the others, or None if no worker failed.

    In order of preference: the first failure that does not report a lost peer; a worker with an error that was still
    shutting down when it was signalled; the first failure.
    """
    failures = [worker for worker in exits if worker.failed]
    own_failures = [worker for worker in failures if not worker.reports_lost_peer and not worker.is_preempted]
    shutting_down = [worker for worker in exits if worker.was_signalled and worker.has_own_error]
    return next(iter(own_failures or shutting_down or failures), None)


def reports_lost_peer(text: str) -> bool:
    """Whether `text` has an error of TensorFlow about a lost peer."""
    return bool(_LOST_PEER.search(text))
