"""How a worker ended, and which of several failures is the cause."""

import dataclasses
import re
import signal
from collections.abc import Sequence

from tfdist.cluster.exit_codes import PREEMPTED_EXIT_CODE

_SHOWN_LINES = 20
_TRACEBACK = "Traceback (most recent call last):"
_ECHO = re.compile(
    r"UnavailableError|Connection reset by peer|Error received from peer|Socket closed|failed to connect to all "
    r"addresses|heartbeat timeout|CoordinationServiceError|Failed to send RPC to coordination service|coordination "
    r"service encountered an error|Coordination agent is set to error"
)
_INFORMATION = re.compile(r"[-\d]+ [\d:.]+: I |I\d{4} ")  # how TensorFlow marks it in its own log
_EXCEPTION = re.compile(r"([A-Za-z_][\w.]*)(?::|$)")


@dataclasses.dataclass(frozen=True)
class WorkerEnd:
    """How one worker ended.

    Args:
        rank: The worker's rank.
        returncode: Its exit code, or minus the number of the signal that killed it.
        last_lines: Its last lines of output, both streams.
        was_told: Whether the launcher had told it to end before it did.
        verdict: Why the launcher itself ended it, for example "frozen: no heartbeat for 10 s", or an empty string.
        at: When it ended, in seconds since 1970.
        task: What users are told instead of the rank, for example "ps 0", or an empty string.
        host: The name of its host where the run has several, or an empty string.
    """

    rank: int
    returncode: int
    last_lines: tuple[str, ...] = ()
    was_told: bool = False
    verdict: str = ""
    at: float = 0.0
    task: str = ""
    host: str = ""

    @property
    def name(self) -> str:
        """What users are told.

        >>> WorkerEnd(3, 1).name, WorkerEnd(3, 1, host="b").name, WorkerEnd(3, 1, task="ps 0").name
        ('worker 3', 'worker 3 on b', 'ps 0')
        """
        name = self.task or f"worker {self.rank}"
        return f"{name} on {self.host}" if self.host else name

    @property
    def failed(self) -> bool:
        """Whether it ended by itself and not with 0, or the launcher had to end it."""
        return bool(self.verdict) or (self.returncode != 0 and not self.was_told)

    @property
    def is_preempted(self) -> bool:
        """Whether it saved and left because it was told to, by whomever."""
        return self.returncode == PREEMPTED_EXIT_CODE

    @property
    def exit_code(self) -> int:
        """The exit code a shell would show: 128 + number for a signal.

        >>> WorkerEnd(0, -9).exit_code
        137
        """
        return self.returncode if self.returncode >= 0 else 128 - self.returncode

    @property
    def is_echo(self) -> bool:
        """Whether its last words speak of a peer that is gone, so that the cause is likely elsewhere."""
        was_killed = self.returncode < 0 and self.returncode != -signal.SIGABRT
        return not was_killed and tells_of_a_lost_peer("\n".join(self._last_words()))

    @property
    def raised(self) -> bool:
        """Whether its last words are an error of its own, though it may not have ended by itself."""
        return _TRACEBACK in self.last_lines and not tells_of_a_lost_peer("\n".join(self._last_words()))

    @property
    def exception(self) -> str:
        """The type of the exception that it printed last, or an empty string.

        >>> WorkerEnd(0, 1, ("Traceback (most recent call last):", "  File ...", "KeyError: 1")).exception
        'KeyError'
        """
        if _TRACEBACK not in self.last_lines:
            return ""
        named = (_EXCEPTION.match(line) for line in self._last_words()[1:])
        return next((match[1] for match in named if match), "")

    def describe(self) -> str:
        """Returns how it ended.

        >>> WorkerEnd(1, 3).describe(), WorkerEnd(1, -11).describe()
        ('exit code 3', 'killed by SIGSEGV')
        """
        if self.verdict:
            return self.verdict
        if self.returncode >= 0:
            return f"exit code {self.returncode}"
        is_mystery = self.returncode == -signal.SIGKILL and not self.was_told
        hint = " (if nobody did so by hand: often the kernel, out of memory)" if is_mystery else ""
        return f"killed by {signal_name(-self.returncode)}{hint}"

    def report(self) -> list[str]:
        """Returns the lines that name it as the cause of the failure."""
        how = self.describe()
        if self.was_told and not self.verdict:
            how = "an error, while it was still shutting down"
        if not self.last_lines:
            return [f"{self.name} failed first: {how}. It printed nothing."]
        shown = self.last_lines[-_SHOWN_LINES:]
        return [f"{self.name} failed first: {how}. Its last lines:", *(f"  | {line}" for line in shown)]

    def _last_words(self) -> tuple[str, ...]:
        starts = [i for i, line in enumerate(self.last_lines) if line.startswith(_TRACEBACK)]
        words = self.last_lines[starts[-1] :] if starts else self.last_lines[-_SHOWN_LINES:]
        return tuple(line for line in words if not _INFORMATION.match(line))


def cause(ends: Sequence[WorkerEnd]) -> WorkerEnd | None:
    """Returns the failure that the others followed from, or None where nothing failed.

    That is the first in time, unless it only tells of a peer's end: then the first that does not, then one that was
    still shutting down after an error of its own.

    Args:
        ends: How the workers ended, in the order in which they did.
    """
    failures = [end for end in ends if end.failed]
    own = [end for end in failures if not end.is_echo and not end.is_preempted]
    shutting_down = [end for end in ends if end.was_told and end.raised]
    return next(iter(own or shutting_down or failures), None)


def tells_of_a_lost_peer(text: str) -> bool:
    """Whether TensorFlow speaks there of a peer that is gone.

    >>> tells_of_a_lost_peer("UnavailableError: Collective ops is aborted by: Socket closed")
    True
    """
    return bool(_ECHO.search(text))


def signal_name(number: int) -> str:
    """Returns for example `"SIGTERM"`.

    >>> signal_name(15), signal_name(200)
    ('SIGTERM', 'signal 200')
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
