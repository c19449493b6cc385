"""The workers of an attempt: started, signalled and shut down as a group."""

import math
import signal
import time
from collections.abc import Collection, Mapping

from tfdist.launch.processes.orphan_reaper import OrphanReaper, reap_orphans
from tfdist.launch.processes.warm_spares import WarmSpares
from tfdist.launch.processes.worker_process import WorkerProcess
from tfdist.launch.run_spec import SERVER_COMMAND, Role

_REAP_SECONDS = 1.0
_POLL_SECONDS = 0.05
# The kernel may be unable to end a process even by SIGKILL (a stuck disk): the launcher does not wait forever.
_UNKILLABLE_SECONDS = 30.0


class WorkerGroup:
    """The worker processes of this host. `spared` are process ids of children of this process that are not orphans."""

    def __init__(
        self, reaper: OrphanReaper, spares: WarmSpares, *, keeps_spares: bool, spared: Collection[int] = ()
    ) -> None:
        self.workers: dict[int, WorkerProcess] = {}  # by rank
        self._reaper, self._spares, self._keeps_spares, self._spared = reaper, spares, keeps_spares, set(spared)
        self._reap_at = 0.0
        self._watched: set[int] = set()  # process groups that are not empty
        self._roles: dict[int, Role] = {}
        self._former: list[WorkerProcess] = []  # exited workers whose children may be left

    def start(self, rank: int, environ: Mapping[str, str], role: Role) -> WorkerProcess:
        """Starts a worker. It replaces an exited worker of the same rank."""
        if role.runs_script:
            worker = self._spares.start_worker(rank, environ)
        else:
            worker = WorkerProcess(rank, SERVER_COMMAND, environ)
        # Registered first: a signal handler may call `send_signal` between any two instructions.
        self._roles[rank] = role
        former = self.workers.get(rank)
        if former is not None:
            former.close()
            self._spares.close_connection(former)
            self._former.append(former)
        self.workers[rank] = worker
        self._reaper.watch(worker.pid)
        self._watched.add(worker.pid)
        return worker

    def prepare_spare(self, environ: Mapping[str, str]) -> None:
        """Starts a spare if one is missing. Call this repeatedly while the workers train."""
        if self._keeps_spares:
            self._spares.refill(environ)

    @property
    def running(self) -> list[WorkerProcess]:
        """The workers that have not been reaped."""
        return [worker for worker in self.workers.values() if worker.returncode is None]

    @property
    def runs_script(self) -> bool:
        return any(self._roles[worker.rank].runs_script for worker in self.running)

    @property
    def all_run_script(self) -> bool:
        return all(role.runs_script for role in self._roles.values())

    def send_signal(self, number: int, *, only_script: bool = False) -> None:
        """Sends a signal to all workers and their children, or only to those that run the script."""
        for worker in [*self.workers.values(), *self._former]:
            if self._roles[worker.rank].runs_script or not only_script:
                worker.send_signal(number)

    def is_gone(self) -> bool:
        """Whether all workers have been reaped and their process groups are empty."""
        for worker in [*self.workers.values(), *self._former]:
            if worker.pid in self._watched and worker.is_gone():
                self._watched.remove(worker.pid)
                self._reaper.forget(worker.pid)
        self._former = [worker for worker in self._former if worker.pid in self._watched]
        return not self._watched

    def reap(self) -> bool:
        """Reaps the workers that have exited and returns whether all are gone."""
        for worker in self.workers.values():
            worker.reap()
        return self.is_gone()

    def reap_orphans(self) -> None:
        """Reaps, at most once a second, exited processes that workers left behind."""
        if time.monotonic() >= self._reap_at:
            self._reap_at = time.monotonic() + _REAP_SECONDS
            running_pids = {worker.pid for worker in self.running}
            reap_orphans(spared=running_pids | self._spares.pids | self._spared)

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()
        self._spares.close_connections()


class GroupShutdown:
    """The shutdown of a worker group: SIGTERM, and SIGKILL after a grace period. Times are monotonic, in seconds."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        self.began_at: float | None = None  # None: no worker has been signalled
        self.all_signalled = False
        self._kill_at = math.inf
        self._killed_at: float | None = None

    @property
    def has_begun(self) -> bool:
        return self.began_at is not None

    @property
    def has_killed(self) -> bool:
        return self._killed_at is not None

    def terminate(self, grace_seconds: float, *, only_script: bool = False) -> None:
        """Sends SIGTERM, and schedules SIGKILL for all. An earlier SIGKILL that is already scheduled stays.

        With `only_script` it signals only the processes that run the script; a second call signals the others.
        """
        now = time.monotonic()
        self.began_at = now if self.began_at is None else self.began_at
        self._kill_at = min(self._kill_at, now + grace_seconds)
        self.all_signalled = not only_script or self._group.all_run_script
        self._group.send_signal(signal.SIGTERM, only_script=only_script)

    def kill(self) -> None:
        """Kills all immediately. A signal handler may call this between any two instructions."""
        now = time.monotonic()
        self.began_at = now if self.began_at is None else self.began_at
        self.all_signalled = True
        self._killed_at = now
        self._group.send_signal(signal.SIGKILL)

    def kill_if_due(self) -> None:
        if self._killed_at is None and time.monotonic() >= self._kill_at:
            self.kill()

    def is_over(self) -> bool:
        """Whether all processes are gone, or those that are left cannot be killed."""
        if self._killed_at is not None and time.monotonic() > self._killed_at + _UNKILLABLE_SECONDS:
            return True
        return self._group.is_gone()

    def finish(self, grace_seconds: float) -> None:
        """Ends all remaining processes without messages, whatever failed before, and closes their descriptors.

        Without a grace period it kills them immediately.
        """
        if grace_seconds:
            self.terminate(grace_seconds)
        deadline = time.monotonic() + grace_seconds
        while not self._group.reap() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        if not self._group.reap():
            self.kill()
        while not self.is_over():
            self._group.reap()
            time.sleep(_POLL_SECONDS)
        self._group.close()
