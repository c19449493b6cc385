"""The worker processes of an attempt, until nothing of them is left."""

import time
from collections.abc import Collection, Mapping

from tfdist.launch.guardian import Guardian
from tfdist.launch.roles import SERVER_COMMAND, Role
from tfdist.launch.spares import Spares
from tfdist.launch.worker_process import WorkerProcess, collect_orphans

_ORPHANS_SECONDS = 1.0


class Crew:
    """Workers that are told things together.

    Args:
        guardian: Ends those that are left when this process is killed.
        spares: Where those come from that run the script.
        keeps_spares: Whether spares are made for a next attempt.
        spared: Process ids of children of this process that are nobody's orphans.
    """

    def __init__(self, guardian: Guardian, spares: Spares, *, keeps_spares: bool, spared: Collection[int] = ()) -> None:
        self.workers: list[WorkerProcess] = []
        self._guardian, self._spares, self._keeps_spares, self._spared = guardian, spares, keeps_spares, set(spared)
        self._orphans_at = 0.0
        self._guarded: set[int] = set()  # the groups that are not gone
        self._roles: dict[int, Role] = {}
        self._former: list[WorkerProcess] = []  # those of which something may be left

    def hire(self, rank: int, environ: Mapping[str, str], role: Role) -> WorkerProcess:
        """Starts a worker, in the place of the one of that rank that has ended.

        Raises:
            OSError: If the system has no room for another process.
        """
        if role.runs_script:
            worker = self._spares.hire(rank, environ)
        else:
            worker = WorkerProcess(rank, SERVER_COMMAND, environ)
        self._roles[rank] = role  # before it is told anything, which may be between any two instructions
        former = next((place for place, before in enumerate(self.workers) if before.rank == rank), None)
        if former is None:
            self.workers.append(worker)
        else:
            self.workers[former].close()
            self._former.append(self.workers[former])
            self.workers[former] = worker
        self._guardian.watch(worker.pid)
        self._guarded.add(worker.pid)
        return worker

    def prepare_next(self, environ: Mapping[str, str]) -> None:
        """Makes a spare where one is wanted; to be called now and then while the workers train."""
        if self._keeps_spares:
            self._spares.refill(environ)

    @property
    def running(self) -> list[WorkerProcess]:
        """The workers that have not been reaped."""
        return [worker for worker in self.workers if worker.returncode is None]

    @property
    def runs_script(self) -> bool:
        """Whether any of those that run the script has not been reaped."""
        return any(self._roles[worker.rank].runs_script for worker in self.running)

    @property
    def is_alike(self) -> bool:
        """Whether all run the script."""
        return all(role.runs_script for role in self._roles.values())

    def tell(self, number: int, *, only_script: bool = False) -> None:
        """Sends a signal to all workers and what they started, or to those that run the script."""
        for worker in [*self.workers, *self._former]:
            if self._roles[worker.rank].runs_script or not only_script:
                worker.tell(number)

    def are_gone(self) -> bool:
        """Whether all have been reaped and nothing of their groups is left."""
        for worker in [*self.workers, *self._former]:
            if worker.pid in self._guarded and worker.is_gone():
                self._guarded.remove(worker.pid)
                self._guardian.forget(worker.pid)
        self._former = [worker for worker in self._former if worker.pid in self._guarded]
        return not self._guarded

    def collect(self) -> bool:
        """Reaps those that have ended, without a word, and returns whether all are gone."""
        for worker in self.workers:
            worker.reap()
        return self.are_gone()

    def collect_orphans(self) -> None:
        """Reaps, once a second at most, what workers had started and left behind, and what has ended since."""
        if time.monotonic() >= self._orphans_at:
            self._orphans_at = time.monotonic() + _ORPHANS_SECONDS
            own = {worker.pid for worker in self.running}
            collect_orphans(spared=own | self._spares.pids | self._spared)

    def close(self) -> None:
        """Closes all descriptors."""
        for worker in self.workers:
            worker.close()
        self._spares.let_go()
