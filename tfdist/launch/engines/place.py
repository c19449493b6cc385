"""A place: a process of an engine that supervises one worker, as one node of several."""

import dataclasses
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping

from tfdist.cluster import LOST_RUN_EXIT_CODE
from tfdist.launch.engines.engine_call import PlaceAddress, PlaceResult, PlaceTask, Versions
from tfdist.launch.function_call.child_programs import call_directory
from tfdist.launch.function_call.launcher_process import LauncherProcess
from tfdist.launch.function_call.worker_results import FAILURE, count_attempts, read_failure, read_results
from tfdist.launch.run_spec import TOKEN_VARIABLE
from tfdist.utils.cores_and_ports import ReservedPorts

# From the end of the grace period, when the launcher kills its workers, to SIGKILL for the launcher.
_KILL_SECONDS = 5.0
# Variables of `srun`, which are those of the engine's process: its tasks are not the workers.
_STEP_VARIABLES = ("SLURM_STEP_ID", "SLURM_PROCID")
_SAID = "tfdist: "
_START_AGAIN_SECONDS = 1.0


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
    is_leaving: Callable[[], bool] = lambda: False,
    environ: Mapping[str, str] | None = None,
    is_killed: bool = False,
    is_again: bool = False,
) -> PlaceResult:
    """Supervises the worker of a place until the round ends.

    The launcher is a child of this process. If this process or thread dies, the kernel sends it SIGTERM; the worker can
    save, and nothing is left. In an elastic call it is started again if it is killed: the others train on meanwhile.

    Args:
        task: What to do.
        show: Shows a line of the worker, behind its rank ("[1] ..."), and in place 0 also those of the launcher.
        should_stop: Asked a few times a second: whether the workers have to save and leave.
        is_leaving: Likewise: whether only this place ends. In an elastic call its launcher is killed then: SIGTERM
            would end all.
        environ: Variables to set in addition, such as the devices that the engine gives.
        is_killed: Whether the launcher of an elastic call is killed when this process dies: the others train on.
        is_again: Whether the place was lost and the others have trained on. A command that is rejected then, as because
            they have ended meanwhile, is no error of the call.
    """
    if (own_versions := Versions.of_this_process()) != task.versions:
        problem = (
            f"A place has other versions than the driver. Received: {own_versions} in {sys.executable} on "
            f"{socket.gethostname()}. Expected: {task.versions}. Install the driver's versions on all hosts of the "
            "engine, or make it use another Python: by PYSPARK_PYTHON for Spark, by the command that starts the "
            "workers for Dask."
        )
        if is_again:
            return PlaceResult(task.rank, LOST_RUN_EXIT_CODE, {}, None, (problem,), is_absent=True)
        return PlaceResult(task.rank, 2, {}, None, (), problem)
    while True:
        stops = should_stop, is_leaving
        result = _run_launcher(task, show, stops, environ or {}, is_killed=is_killed and task.is_elastic)
        if is_again and result.usage_error:
            return dataclasses.replace(
                result,
                exit_code=LOST_RUN_EXIT_CODE,
                usage_error="",
                last_lines=(result.usage_error,),
                is_absent=True,
            )
        if not task.is_elastic or not result.is_lost or task.run in _stopped_runs or should_stop() or is_leaving():
            return result
        show(f"{_SAID}the launcher of place {task.rank} was ended by SIGKILL; it starts again")
        time.sleep(_START_AGAIN_SECONDS)
        is_again = True


def _run_launcher(
    task: PlaceTask,
    show: Callable[[str], None],
    stops: tuple[Callable[[], bool], Callable[[], bool]],
    environ: Mapping[str, str],
    *,
    is_killed: bool,
) -> PlaceResult:
    with call_directory(task.call, prefix="tfdist-place-") as (directory, script):
        arguments = [*task.arguments, "--error-file", str(directory / FAILURE), str(script)]
        variables = {name: value for name, value in os.environ.items() if name not in _STEP_VARIABLES}
        variables |= {TOKEN_VARIABLE: task.token, **environ}

        def show_once(line: str, is_error: bool) -> None:
            # The launchers of all places say the same.
            if task.rank == 0 or not line.startswith(_SAID):
                show(line)

        with LauncherProcess(
            arguments, directory=str(directory), is_killed=is_killed, environ=variables, show=show_once
        ) as launcher:
            stop = _Stop(task, launcher, *stops)
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


class _Stop:
    """Ends a launcher when it should stop: SIGTERM, and SIGKILL if it does not end in time."""

    def __init__(
        self,
        task: PlaceTask,
        launcher: LauncherProcess,
        should_stop: Callable[[], bool],
        is_leaving: Callable[[], bool] = lambda: False,
    ) -> None:
        self._task, self._launcher, self._should_stop, self._is_leaving = task, launcher, should_stop, is_leaving
        self._kill_at: float | None = None

    def poll(self) -> None:
        now = time.monotonic()
        if self._kill_at is not None:
            if now >= self._kill_at:
                self._launcher.send_signal(signal.SIGKILL)
            return
        should_stop = self._task.run in _stopped_runs or self._should_stop()
        if self._task.is_elastic and self._is_leaving():  # asked last: `should_stop` may say so, too
            self._launcher.send_signal(signal.SIGKILL)
        elif should_stop:
            self._launcher.send_signal(signal.SIGTERM)
            self._kill_at = now + self._task.grace_seconds + _KILL_SECONDS
