"""A place: a process of an engine that supervises one worker, as one node of several."""

import dataclasses
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from tfdist.cluster import LOST_RUN_EXIT_CODE, PREEMPTED_EXIT_CODE
from tfdist.launch.engines.engine_call import PlaceAddress, PlaceTask, Versions
from tfdist.launch.function_call.child_programs import call_directory
from tfdist.launch.function_call.launcher_process import LauncherProcess
from tfdist.launch.function_call.worker_results import FAILURE, RankResult, count_attempts, read_failure, read_results
from tfdist.launch.run_spec import TOKEN_VARIABLE
from tfdist.utils.cores_and_ports import ReservedPorts
from tfdist.utils.formatting import signal_name

# From the end of the grace period, when the launcher kills its workers, to SIGKILL for the launcher.
_KILL_SECONDS = 5.0
# Variables of `srun`, which are those of the engine's process: its tasks are not the workers.
_STEP_VARIABLES = ("SLURM_STEP_ID", "SLURM_PROCID")
_SAID = "tfdist: "
# Exit codes of a launcher whose place has announced its end, or has lost the others.
_LEFT = (PREEMPTED_EXIT_CODE, LOST_RUN_EXIT_CODE)


@dataclasses.dataclass(frozen=True)
class PlaceResult:
    """How a round ended in a place."""

    rank: int  # number of the place
    exit_code: int  # exit code of the launcher; negative: the signal that killed it
    results: dict[tuple[int, int], RankResult]  # the results of the workers of this place, by attempt and rank
    failure: dict[str, Any] | None  # the launcher's error file of the last failed attempt, or None
    last_lines: tuple[str, ...]  # what the launcher said last
    usage_error: str = ""  # the launcher's message about a wrong command, or an empty string
    attempts: int = 0  # number of attempts that have begun; 0 if the function is called in other places only

    @property
    def is_interrupted(self) -> bool:
        """Whether the round ended because a place was lost or announced its end, not by the function."""
        return (self.is_killed or self.exit_code in _LEFT) and not self._is_exit_of_worker

    @property
    def is_killed(self) -> bool:
        """Whether a signal has ended the launcher, or its worker, whose exit code it then has."""
        return self.exit_code < 0 or self.exit_code > 128

    @property
    def used_attempts(self) -> int:
        """Number of attempts of this round that have failed or begun."""
        return max(self.attempts, 0 if self.failure is None else int(self.failure["attempt"]) + 1)

    @property
    def ends_round(self) -> bool:
        """Whether the engine's adapter has to stop the other places.

        The launcher was killed, has left, or has rejected its command; the others would wait for it until
        `start_timeout_seconds`.
        """
        return self.is_interrupted or bool(self.usage_error)

    @property
    def _is_exit_of_worker(self) -> bool:
        if self.failure is None or int(self.failure["attempt"]) + 1 < self.attempts:
            return False
        cause = self.failure["cause"]
        matches_cause = cause.get("exit_code") == self.exit_code or cause.get("signal") == signal_name(
            self.exit_code - 128
        )
        return matches_cause and self.exit_code != PREEMPTED_EXIT_CODE


def place_address(host: str) -> PlaceAddress:
    """Returns the address of this place, with a free port."""
    with ReservedPorts(1) as reserved:
        return PlaceAddress(host, reserved.ports[0], os.getpid())


_stopped_runs: set[str] = set()  # rounds that another thread has asked to stop


def stop_places(run: str) -> None:
    """Ends the round in this process, from any thread: the workers can save and leave, and are then killed.

    A place of this round that starts later ends at once.
    """
    _stopped_runs.add(run)


def run_place(
    task: PlaceTask,
    *,
    show: Callable[[str], None] = print,
    should_stop: Callable[[], bool] = lambda: False,
    environ: Mapping[str, str] | None = None,
) -> PlaceResult:
    """Supervises the worker of a place until the round ends.

    The launcher is a child of this process. If this process or thread dies, the kernel sends it SIGTERM; the worker can
    save, and nothing is left.

    Args:
        task: What to do.
        show: Shows a line of the worker, behind its rank ("[1] ..."), and in place 0 also those of the launcher.
        should_stop: Asked a few times a second: whether the workers have to save and leave.
        environ: Variables to set in addition, such as the devices that the engine gives.
    """
    if problem := _other_versions(task):
        return PlaceResult(task.rank, 2, {}, None, (), problem)
    with call_directory(task.call, prefix="tfdist-place-") as (directory, script):
        arguments = [*task.arguments, "--error-file", str(directory / FAILURE), str(script)]
        variables = {name: value for name, value in os.environ.items() if name not in _STEP_VARIABLES}
        variables |= {TOKEN_VARIABLE: task.token, **(environ or {})}

        def show_once(line: str, is_error: bool) -> None:
            # The launchers of all places say the same.
            if task.rank == 0 or not line.startswith(_SAID):
                show(line)

        with LauncherProcess(arguments, directory=str(directory), environ=variables, show=show_once) as launcher:
            stop = _Stop(task, launcher, should_stop)
            code = launcher.follow(stop.poll)
        return PlaceResult(
            task.rank,
            code,
            read_results(directory),
            read_failure(directory),
            launcher.last_lines,
            launcher.error,
            count_attempts(directory),
        )


def _other_versions(task: PlaceTask) -> str:
    own_versions = Versions.of_this_process()
    if own_versions == task.versions:
        return ""
    return (
        f"A place has other versions than the driver. Received: {own_versions} in {sys.executable} on "
        f"{socket.gethostname()}. Expected: {task.versions}. Install the driver's versions on all hosts of the engine, "
        "or make it use another Python: by PYSPARK_PYTHON for Spark, by the command that starts the workers for Dask."
    )


class _Stop:
    """Ends a launcher when it should stop: SIGTERM, and SIGKILL if it does not end in time."""

    def __init__(self, task: PlaceTask, launcher: LauncherProcess, should_stop: Callable[[], bool]) -> None:
        self._task, self._launcher, self._should_stop = task, launcher, should_stop
        self._kill_at: float | None = None

    def poll(self) -> None:
        now = time.monotonic()
        if self._kill_at is not None:
            if now >= self._kill_at:
                self._launcher.send_signal(signal.SIGKILL)
        elif self._task.run in _stopped_runs or self._should_stop():
            self._launcher.send_signal(signal.SIGTERM)
            self._kill_at = now + self._task.grace_seconds + _KILL_SECONDS
