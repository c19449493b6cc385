"""Checkpoints of workers of which some are lost during a save: complete without them, or given up, and never torn."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from accumulating_workers import MICRO_STEPS, AccumulatingWorker, micro_steps_after
from thread_workers import ROWS, Faults, ThreadWorker, training, wait_until

from tfdist.checkpoint import Checkpoint, CheckpointStore, SavingRanks, Shard
from tfdist.checkpoint.sharded_save import ShardedSave
from tfdist.elastic.elastic_coordination import ElasticCoordination

pytestmark = pytest.mark.usefixtures("cpus")

_EVERY = 50  # steps


class _Saves:
    """Lets a worker save every `_EVERY` steps, as `FailureRecovery` does: the step, by all of the view.

    Attributes:
        before_write: Called before it writes a part of a checkpoint.
    """

    def __init__(self, worker: ThreadWorker, directory: Path) -> None:
        self.worker, self.store = worker, CheckpointStore(directory, keep=1000, peer_timeout_seconds=60.0)
        self.coordination = ElasticCoordination(worker.transactions, lambda is_own: None)
        self._following = 0
        self.before_write: Any = lambda: None
        worker.after_step = self._after_step

    def _after_step(self) -> None:
        step = self.worker.membership.committed_steps
        if step % _EVERY == 0 and (saving := self.coordination.begin_save(None, is_last=False)) is not None:
            self.save(step, saving)

    def save(self, step: int, saving: SavingRanks) -> None:
        """Writes the part of this worker."""
        rank = self.worker.rank
        sequence = self.coordination.sequence_of_save(0, self._following)
        self._following = sequence + 1
        self.before_write()
        self.store.save(
            sequence,
            "attempt",
            rank=rank,
            num_ranks=3,
            rank_shard=self._shard(step),
            shared_shard=self._shard(step) if saving.chief == rank else None,
            metadata={"step": step},
            saving=saving,
        )

    def _shard(self, step: int) -> Shard:
        return Shard({"total": np.array(self.worker.totals[step])})


def _complete(directory: Path) -> list[Checkpoint]:
    store = CheckpointStore(directory)
    return [store.open(info.sequence) for info in store.list_checkpoints() if info.status == "complete"]


def _steps(directory: Path) -> dict[int, tuple[int, ...]]:
    """Returns the ranks that have saved, by step; all files of a checkpoint are of its step."""
    found = {}
    for checkpoint in _complete(directory):
        shards = [checkpoint.read_shared(), *map(checkpoint.read_rank, checkpoint.saved_ranks)]
        assert len({int(shard.tensors["total"]) for shard in shards}) == 1, "the checkpoint is torn"
        found[checkpoint.metadata["step"]] = checkpoint.saved_ranks
    return found


def _wait_for_save(directory: Path, ranks: tuple[int, ...]) -> None:
    wait_until(lambda: ranks in _steps(directory).values(), f"a checkpoint of {ranks}")


@pytest.mark.parametrize("victim", [*(pytest.param(rank, marks=pytest.mark.long) for rank in (0, 1)), 2])
def test_a_worker_that_is_lost_before_it_has_written(tmp_path: Path, victim: int) -> None:
    with training(3) as workers:
        saves = [_Saves(worker, tmp_path) for worker in workers.trained]
        _wait_for_save(tmp_path, (0, 1, 2))
        lost, waits, step = workers.of_rank(victim), threading.Event(), 0

        def wait_for_its_end() -> None:
            nonlocal step
            step = lost.membership.committed_steps
            waits.set()
            wait_until(lambda: lost.is_killed, "the kill")
            raise SystemExit

        saves[victim].before_write = wait_for_its_end
        assert waits.wait(60)
        lost.kill()
        others = tuple({0, 1, 2} - {victim})
        _wait_for_save(tmp_path, others)
        wait_until(lambda: max(_steps(tmp_path)) > step, "a save after the loss")
        # The save is that of those that are left, or nobody's if the one that commits is lost.
        assert _steps(tmp_path).get(step) in (None, others) if victim else step not in _steps(tmp_path)
        workers.wait_for_steps(*others)
        workers.finish()


@pytest.mark.long  # by default on processes, in `test_elastic_on_workers.py`
def test_a_chief_that_is_lost_before_it_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with training(3) as workers:
        chief, steps, commit = workers.of_rank(0), [], ShardedSave._commit

        def commit_or_end(save: Any, manifest: Any) -> Any:
            if save._rank == 0:
                steps.append(manifest.metadata["step"])
                chief.kill()
                raise SystemExit
            return commit(save, manifest)

        monkeypatch.setattr(ShardedSave, "_commit", commit_or_end)
        monkeypatch.setattr(ShardedSave, "_clean_up", lambda save, error: None)  # a killed process cleans nothing up
        for worker in workers.trained:
            _Saves(worker, tmp_path)
        _wait_for_save(tmp_path, (1, 2))
        assert len(steps) == 1 and steps[0] not in _steps(tmp_path)
        wait_until(lambda: not [*tmp_path.glob(".unfinished*")], "what is left of its save is removed")
        workers.start(0)
        workers.wait_for_steps(0, 1, 2)
        _Saves(workers.of_rank(0), tmp_path)
        wait_until(lambda: (0, 1, 2) in _steps(tmp_path).values(), "a save with the worker that has joined")
        workers.finish()


class _SavesOfSums(_Saves):
    """Saves the own sums of a worker within an accumulation.

    Attributes:
        after_exchange: Whether it saves after a step by itself, which is no training step.
        at_step: Called after each step, before it saves, with whether a save follows this step or the next one.
    """

    after_exchange = False

    def __init__(self, worker: Any, directory: Path) -> None:
        self.at_step: Any = lambda is_due, is_due_next: None
        super().__init__(worker, directory)
        self.coordination = ElasticCoordination(
            worker.transactions, lambda is_own: None, lambda model: worker._accumulation.view_of_sums
        )

    def _is_due(self, step: int) -> bool:
        micro_steps = micro_steps_after(step)
        return micro_steps % 20 == 2 and (not self.after_exchange or micro_steps_after(step - 1) == micro_steps)

    def _after_step(self) -> None:
        step = self.worker.membership.committed_steps
        self.at_step(self._is_due(step), self._is_due(step + 1))
        if self._is_due(step) and (saving := self.coordination.begin_save(None, is_last=False)) is not None:
            self.save(step, saving)

    def _shard(self, step: int) -> Shard:
        worker: Any = self.worker
        return Shard({**super()._shard(step).tensors, "sums": worker._own_sums.value})


def _check_sums(directory: Path) -> None:
    """Checks that the ranks of each checkpoint have together the rows of all steps of the accumulation."""
    for checkpoint in _complete(directory):
        micro_steps = micro_steps_after(checkpoint.metadata["step"])
        numbers = range(micro_steps // MICRO_STEPS * MICRO_STEPS + 1, micro_steps + 1)
        total = sum(checkpoint.read_rank(rank).tensors["sums"] for rank in checkpoint.saved_ranks)
        assert (total == ROWS * sum(numbers)).all(), (checkpoint.metadata, checkpoint.saved_ranks, total)


@pytest.mark.parametrize("lost", ["before it has written", "after the step", "in an exchange before the save"])
def test_accumulated_gradients_of_a_worker_that_is_lost_are_in_a_checkpoint_or_it_is_given_up(
    tmp_path: Path, lost: str
) -> None:
    with training(3, kind=AccumulatingWorker) as workers:
        saves = [_SavesOfSums(worker, tmp_path) for worker in workers.trained]
        victim, steps = workers.of_rank(2), []

        def end(is_here: bool = True) -> None:
            if is_here:
                steps.append(victim.membership.committed_steps)
                victim.kill()
                raise SystemExit

        for own in saves:
            own.after_exchange = lost.startswith("in")
        _wait_for_save(tmp_path, (0, 1, 2))
        if lost.startswith("before"):
            saves[2].before_write = end
        else:
            saves[2].at_step = lambda is_due, is_due_next: end(is_due_next if lost.startswith("in") else is_due)
        _wait_for_save(tmp_path, (0, 1))
        workers.wait_for_steps(0, 1)
        _check_sums(tmp_path)
        assert steps[0] + lost.startswith("in") not in _steps(tmp_path)
        workers.finish()


def test_what_the_oldest_worker_decides_is_decided_again_by_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers begin with the checkpoint that one of them has chosen, whichever is lost meanwhile."""
    decided: dict[int, Any] = {}
    with training(3) as workers:
        for worker in workers.trained:
            exchange = lambda value, worker=worker: tf.constant(  # noqa: E731
                worker.exchange.channel("steps").all_reduce(np.atleast_1d(value.numpy())).reshape(value.shape)
            )
            worker.transactions._sum = exchange

        def decide(worker: ThreadWorker) -> None:
            def find() -> Any:
                if worker.rank == 0:
                    threading.Thread(target=worker.kill).start()
                    wait_until(lambda: worker.is_killed and worker.exchange.failure is not None, "its end")
                return [worker.rank, "name", None]

            worker.after_step = lambda: None
            coordination = ElasticCoordination(worker.transactions, lambda is_own: None)
            decided[worker.rank] = coordination.decide("resume", find)

        at = max(worker.membership.committed_steps for worker in workers.trained) + 50
        for worker in workers.trained:
            worker.after_step = lambda worker=worker: (
                decide(worker) if worker.membership.committed_steps == at else None
            )
        wait_until(lambda: decided.keys() >= {1, 2}, "a decision")
        assert decided[1] == decided[2] == [1, "name", None]


def test_workers_that_are_asked_to_leave_know_when_all_are(faults_of_messages: Faults) -> None:
    with training(3) as workers:
        leaving: dict[int, list[Any]] = {rank: [] for rank in range(3)}
        for worker in workers.trained:
            worker.after_step = lambda worker=worker: leaving[worker.rank].append(
                (worker.membership.committed_steps, set(worker.membership.leaving))
            )
        workers.of_rank(1).membership.leave_after_step()
        wait_until(lambda: all({1} in dict(seen).values() for seen in leaving.values()), "one leaves")
        for rank in (0, 2):
            workers.of_rank(rank).membership.leave_after_step()
        wait_until(lambda: all({0, 1, 2} in dict(seen).values() for seen in leaving.values()), "all leave")
        first = {rank: min(step for step, ranks in seen if len(ranks) == 3) for rank, seen in leaving.items()}
        assert len(set(first.values())) == 1, "they have learned it after different steps"
        faults_of_messages.kill_at(workers.of_rank(2), "ready")
        workers.wait_for_steps(0, 1)
        wait_until(lambda: leaving[0][-1][1] == {0, 1}, "the others leave")


@pytest.mark.parametrize("writes", [pytest.param(True, marks=pytest.mark.long), False])
def test_all_that_leave_save_first(tmp_path: Path, writes: bool) -> None:
    """The last save waits for nobody that makes another step in place of a save; nobody else leaves before it."""
    with training(3) as workers:
        saves = [_Saves(worker, tmp_path) for worker in workers.trained]
        ended: list[int] = []

        def leave(own: _Saves) -> None:
            membership = own.worker.membership
            if not membership.leaving.issuperset({0, 1, 2}) or (own.worker.rank == 2 and not writes):
                return
            saving = own.coordination.begin_save(None, is_last=True)
            assert saving is not None
            own.save(membership.committed_steps, saving)
            own.coordination.wait_for_commit(60.0)
            ended.append(own.worker.rank)
            own.worker.kill()

        for own in saves:
            own.worker.after_step = lambda own=own: leave(own)
        if not writes:  # the others have begun another view before it has learned that all leave
            oldest = workers.of_rank(0).membership
            threading.Timer(0.5, lambda: oldest.report_failure(oldest.view, 0, patience_seconds=0.1)).start()
        for worker in workers.trained:
            worker.membership.leave_after_step()
        wait_until(lambda: {0, 1} <= {*ended}, "all leave")
        assert workers.of_rank(2).error is None, "the last save has waited for a worker that does not write"
        assert set(_steps(tmp_path).values()) == {(0, 1, 2) if writes else (0, 1)}
        assert not writes or ended[0] == 0


@pytest.fixture
def faults_of_messages(monkeypatch: pytest.MonkeyPatch) -> Faults:
    return Faults(monkeypatch)
