"""The run of one host of several: attempt after attempt, as the coordinator says."""

import contextlib
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from tfdist.launch.error_file import ErrorFile
from tfdist.launch.limits import Limits
from tfdist.launch.nodes.coordinator_process import CoordinatorProcess
from tfdist.launch.nodes.dial import dial
from tfdist.launch.nodes.member import End, Membership, Start
from tfdist.launch.nodes.options import NodeOptions
from tfdist.launch.nodes.rules import Rules
from tfdist.launch.output import Console
from tfdist.launch.restarts import Restarts
from tfdist.launch.settlement import Settlements
from tfdist.launch.supervisor import Supervisor


class NodeSupervisor(Supervisor):
    """Runs the attempts of this host in one thread, the main thread.

    Args:
        command: What every worker runs.
        environments: Returns the whole environment of each worker of this host, given what is started.
        console: Where output and messages go.
        log_dir: Where the workers' log files are made, or None.
        workers: Number of workers of this host.
        limits: When workers are judged or ended.
        error_file: Tells programs of failures.
        membership: Of this host in the run.
        warm_spares: Whether to keep a process that has imported TensorFlow for each worker of the next attempt.
    """

    def __init__(
        self,
        command: Sequence[str],
        environments: Callable[[Start], Sequence[Mapping[str, str]]],
        console: Console,
        log_dir: Path | None,
        *,
        workers: int,
        limits: Limits,
        error_file: ErrorFile,
        membership: Membership,
        warm_spares: bool = False,
    ) -> None:
        super().__init__(
            command,
            lambda workers, attempt: environments(self._started),
            console,
            [],
            workers=workers,
            limits=limits,
            # The coordinator decides.
            settlements=Settlements(
                Restarts(workers=workers, min_workers=workers, max_restarts=0, delay_seconds=0.0), membership.run_id
            ),
            error_file=error_file,
            warm_spares=warm_spares,
        )
        self._log_dir = log_dir
        self._open_logs: dict[int, BinaryIO] = {}  # by rank
        self._membership = membership
        self._started = Start(0, 0, 0, ())

    def _run_attempts(self) -> int:
        try:
            while True:
                start = self._membership.wait_for_start(self._signals)
                if isinstance(start, End):
                    return start.code
                self._started = start
                if start.attempt == 0:  # a host that comes back is in the middle of a run
                    with contextlib.suppress(OSError):
                        self._error_file.clear()
                self._logs = [self._log(start.first_rank + index) for index in range(start.own_workers)]
                outcome = self._run_attempt(
                    start.attempt,
                    start.own_workers,
                    first_rank=start.first_rank,
                    may_restart=start.may_restart,
                    others=self._membership,
                )
                self._membership.finish(outcome, self._signals)
        finally:
            self._membership.close()
            self._logs = list(self._open_logs.values())

    def _log(self, rank: int) -> BinaryIO | None:
        """Returns the log file of a rank: emptied in the first attempt, continued in a later one."""
        if self._log_dir is None:
            return None
        if rank not in self._open_logs:
            path = self._log_dir / f"rank-{rank}.log"
            continues = self._started.attempt > 0
            self._open_logs[rank] = open(path, "ab", buffering=0) if continues else open(path, "wb", buffering=0)
        return self._open_logs[rank]


def run_node(
    options: NodeOptions,
    rules: Rules,
    command: Sequence[str],
    environments: Callable[[Start], Sequence[Mapping[str, str]]],
    console: Console,
    log_dir: Path | None,
    *,
    workers: int,
    error_file: ErrorFile,
    warm_spares: bool,
) -> int:
    """Joins the run and takes part in it to its end.

    Args:
        options: Of this host.
        rules: What holds for all hosts, as this one knows it.
        command: What every worker runs.
        environments: Returns the whole environment of each worker of this host, given what is started.
        console: Where output and messages go.
        log_dir: Where the workers' log files are made, or None.
        workers: Number of workers of this host.
        error_file: Tells programs of failures.
        warm_spares: Whether to keep spares.

    Returns:
        The exit code: the same on all hosts that were there at the end, 69 on one that had lost the others.

    Raises:
        UsageError: If it cannot join. Nothing was started then.
    """

    def write(entry: Mapping[str, Any]) -> str:
        return error_file.write({**entry, "attempt": int(entry["attempt"]), "host": socket.gethostname()})

    with joined(options, rules, console, workers=workers, write=write) as membership:
        return NodeSupervisor(
            command,
            environments,
            console,
            log_dir,
            workers=workers,
            limits=rules.limits,
            error_file=error_file,
            membership=membership,
            warm_spares=warm_spares,
        ).run()


@contextlib.contextmanager
def joined(
    options: NodeOptions,
    rules: Rules,
    console: Console,
    *,
    workers: int,
    write: Callable[[Mapping[str, Any]], str],
) -> Iterator[Membership]:
    """Joins the run, and leaves it at the end; on node 0 makes the coordinator before.

    Must be called while the process has one thread.

    Args:
        options: Of this host.
        rules: What holds for all hosts, as this one knows it.
        console: Where messages go.
        workers: Number of workers of this host.
        write: Writes what an error file says, and returns why it could not, or an empty string.

    Yields:
        The membership.

    Raises:
        UsageError: If it cannot join.
    """
    with contextlib.ExitStack() as undo:
        host, has_joined = options.host, False
        if options.rank == 0:
            coordinator = CoordinatorProcess(host, options.port, options.token, rules, console)
            undo.callback(lambda: coordinator.close(has_to_tell=has_joined))
        link = dial(host, options.port, options.token, timeout_seconds=rules.start_timeout, say=console.say)
        membership = Membership(link, options.address, say=console.say, write=write)
        undo.callback(membership.close)
        membership.join(
            {
                "node": options.rank,
                "host": socket.gethostname(),
                "workers": workers,
                "options": {
                    "--nodes": rules.nodes,
                    "--max-restarts": rules.max_restarts,
                    "--min-workers": rules.min_workers,
                },
            }
        )
        console.say(f"node {options.rank} of {options.nodes} has joined run {membership.run_id}")
        has_joined = True
        yield membership
