"""The worker processes of an attempt, until nothing of them is left."""

from collections.abc import Mapping

from tfdist.launch.guardian import Guardian
from tfdist.launch.spares import Spares
from tfdist.launch.worker_process import WorkerProcess


class Crew:
    """Workers that are told things together.

    Args:
        guardian: Ends those that are left when this process is killed.
        spares: Where the workers come from.
        keeps_spares: Whether spares are made for a next attempt.
    """

    def __init__(self, guardian: Guardian, spares: Spares, *, keeps_spares: bool) -> None:
        self.workers: list[WorkerProcess] = []
        self._guardian, self._spares, self._keeps_spares = guardian, spares, keeps_spares
        self._guarded: set[int] = set()  # the groups that are not gone

    def hire(self, rank: int, environ: Mapping[str, str]) -> WorkerProcess:
        """Starts a worker.

        Raises:
            OSError: If the system has no room for another process.
        """
        worker = self._spares.hire(rank, environ)
        self.workers.append(worker)
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

    def tell(self, number: int) -> None:
        """Sends a signal to all workers and what they started."""
        for worker in self.workers:
            worker.tell(number)

    def are_gone(self) -> bool:
        """Whether all have been reaped and nothing of their groups is left."""
        for worker in self.workers:
            if worker.pid in self._guarded and worker.is_gone():
                self._guarded.remove(worker.pid)
                self._guardian.forget(worker.pid)
        return not self._guarded

    def collect(self) -> bool:
        """Reaps those that have ended, without a word, and returns whether all are gone."""
        for worker in self.workers:
            worker.reap()
        return self.are_gone()

    def close(self) -> None:
        """Closes all descriptors."""
        for worker in self.workers:
            worker.close()
        self._spares.let_go()
