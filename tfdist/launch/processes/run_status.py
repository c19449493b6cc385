"""The status of a run: one line, which is painted on a terminal, and messages for a log."""

import os
from collections.abc import Mapping

from tfdist.launch.processes.heartbeat_monitor import HeartbeatMonitor
from tfdist.launch.restart.attempt_outcome import fit_suffix
from tfdist.launch.run_spec import Role, count_workers, describe_jobs
from tfdist.utils.formatting import counted, format_duration

_CHECKPOINT_MESSAGE_SECONDS = 10.0  # minimum time between two messages about checkpoints
_DIM, _RESET = "\x1b[2m", "\x1b[0m"
_ERASE_LINE = "\r\x1b[K"
_REPAINT_SECONDS = 0.2
_MIN_COLUMNS = 20  # a narrower terminal has no room for useful text
_ASCII = str.maketrans({"·": "|", "…": "~"})


class RunStatus:
    """Describes the run from the workers' heartbeats. All times are monotonic, in seconds.

    `FailureRecovery` reports steps and checkpoints; without it only the workers are shown.
    """

    def __init__(self, workers: int) -> None:
        self._all_workers = self._workers = workers
        self._attempt = 0
        self._jobs = ""
        self._began_at = 0.0
        self._has_announced_start = False
        self._announced_jobs = ""
        # The `fit` and the sequence number of the newest checkpoint of all attempts.
        self._saved: tuple[int, int] | None = None
        self._saves: dict[int, int] = {}  # the highest number of each `fit`; an attempt may skip calls
        self._saved_step: int | None = None
        self._saved_at = 0.0
        self._announced_saved: tuple[int, int] | None = None
        self._announced_saved_at = -_CHECKPOINT_MESSAGE_SECONDS

    def begin_attempt(self, attempt: int, roles: Mapping[int, Role], monitor: HeartbeatMonitor, *, now: float) -> None:
        """Records that an attempt begins.

        The roles are those of all hosts, the heartbeats those of this host's processes.
        """
        self._workers = workers = count_workers(roles)
        self._jobs = describe_jobs(roles.values())
        if workers < self._all_workers and len(roles) == workers:
            self._jobs = f"{workers} of {self._all_workers} workers"
        self._attempt, self._monitor, self._began_at = attempt, monitor, now
        self._has_announced_start = False

    def line(self, *, now: float) -> str:
        """Returns the status in one line, the most important part first."""
        self._record_saves(now)
        fit, step, phase = self._monitor.fit, self._monitor.step, self._monitor.phase
        training, wanted = self._monitor.training, self._monitor.resized_to or self._workers
        if training is None:
            parts = [self._jobs]
        elif training < wanted:
            parts = [f"{training} of {counted(wanted, 'worker')} train"]
        else:
            parts = [counted(training, "worker")]
        if step is None:
            parts.append(f"running for {format_duration(now - self._began_at)}")
        else:
            parts.append(f"step {step:,}{fit_suffix(fit)}")
        if phase is not None:
            parts.append(phase)
        if self._attempt:
            parts.append(counted(self._attempt, "restart"))
        if self._saved is not None and self._saved_step is not None and self._saved[0] >= fit:
            checkpoint = f"checkpoint {self._saved_step:,}{fit_suffix(self._saved[0])}"
            parts.append(f"{checkpoint}, {format_duration(now - self._saved_at)} ago")
        return "tfdist: " + " · ".join(parts)

    def new_messages(self, *, now: float, is_over: bool = False) -> list[str]:
        """Returns messages about what has changed since the last call. Frequent checkpoints are reported less often.

        When the attempt `is_over`, all messages are due.
        """
        self._record_saves(now)
        messages = []
        step = self._monitor.step
        if step is not None and not self._has_announced_start:
            self._has_announced_start = True
            messages.append(self._start_message(step, self._monitor.fit))
            self._announced_jobs = self._jobs
        is_due = is_over or now - self._announced_saved_at >= _CHECKPOINT_MESSAGE_SECONDS
        if is_due and self._saved not in (None, self._announced_saved) and self._saved_step is not None:
            self._announced_saved, self._announced_saved_at = self._saved, now
            messages.append(f"checkpoint saved at step {self._saved_step:,}{fit_suffix(self._saved[0])}")
        return messages

    def _start_message(self, step: int, fit: int) -> str:
        how = f"training resumes after step {step:,}{fit_suffix(fit)}" if step else "training begins"
        notes = [f"restart {self._attempt}"] if self._attempt else []
        if self._announced_jobs not in ("", self._jobs):
            notes.append(f"before with {self._announced_jobs}")
        return f"{how} with {self._jobs}" + (f" ({', '.join(notes)})" if notes else "")

    def _record_saves(self, now: float) -> None:
        fit, saved = self._monitor.fit, self._monitor.saved
        if saved is not None and saved > self._saves.get(fit, -1):
            self._saves[fit] = saved
            self._saved, self._saved_step, self._saved_at = (fit, saved), self._monitor.saved_step, now


class StatusLine:
    """The line below all others on a terminal that shows the status of the run.

    Methods return the text to write to the terminal. The line never fills its row, because some terminals would then
    start a new one. The width of the terminal is read at every repaint.
    """

    def __init__(self, terminal: int, *, has_style: bool, is_ascii: bool) -> None:
        self._terminal, self._has_style, self._is_ascii = terminal, has_style, is_ascii
        self._text = self._painted = ""
        self._painted_at = -_REPAINT_SECONDS

    @classmethod
    def on(cls, fd: int, environ: Mapping[str, str], encoding: str) -> "StatusLine | None":
        """Returns the line of a terminal that can repaint it, by TERM and NO_COLOR, or None for any other file."""
        if not os.isatty(fd) or environ.get("TERM", "dumb") in ("", "dumb"):
            return None
        is_ascii = encoding.lower().replace("-", "") != "utf8"
        return cls(fd, has_style=not environ.get("NO_COLOR"), is_ascii=is_ascii)

    def is_on(self, fd: int) -> bool:
        """Whether a file descriptor is the same terminal."""
        return os.isatty(fd) and os.fstat(fd).st_rdev == os.fstat(self._terminal).st_rdev

    def around(self, lines: str) -> str:
        """Returns `lines`, which end with a newline, preceded by code that erases the line and followed by the line."""
        self._painted = self._fitted()
        # The line is erased even if this process has painted none: the process that it was forked from may have.
        return f"{_ERASE_LINE}{lines}{self._painted}"

    def update(self, text: str, *, now: float) -> str:
        """Returns code that shows `text`; empty if it is shown already, or was repainted less than 0.2 s ago.

        An empty text erases the line.
        """
        self._text = text
        fitted = self._fitted()
        if fitted == self._painted or (text and now - self._painted_at < _REPAINT_SECONDS):
            return ""
        self._painted, self._painted_at = fitted, now
        return f"{_ERASE_LINE}{fitted}"

    def _fitted(self) -> str:
        try:
            columns = os.get_terminal_size(self._terminal).columns or 80
        except OSError:
            columns = 80
        if not self._text or columns < _MIN_COLUMNS:
            return ""
        text = self._text if len(self._text) < columns else self._text[: columns - 2] + "…"
        text = text.translate(_ASCII) if self._is_ascii else text
        return f"{_DIM}{text}{_RESET}" if self._has_style else text
