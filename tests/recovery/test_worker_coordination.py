"""Coordination of the workers of a training. Each worker is a thread here."""

import itertools
import threading

import pytest

from tfdist.recovery import worker_coordination


def test_all_get_the_value_of_the_chief(coordinations, in_threads):
    ranks = coordinations(3)
    assert in_threads(lambda rank: ranks[rank].broadcast("resume", [rank, "name"]), (2, 1, 0)) == [[0, "name"]] * 3


def test_workers_begin_with_the_chief_only(coordinations, in_threads):
    ranks = coordinations(3)
    with pytest.raises(RuntimeError, match="of worker 2, and none in those of the chief within 0.1 s"):
        ranks[2].wait_for_chief(0.1)
    in_threads(lambda rank: ranks[rank].wait_for_chief(30), (2, 1, 0))


def test_messages_between_two_workers(coordinations):
    ranks = coordinations(3)
    ranks[1].send(2, "part", {"a": [1]})
    ranks[0].send(2, "part", "b")
    assert ranks[2].receive(1, "part", 30) == {"a": [1]} and ranks[2].receive(0, "part", 30) == "b"
    assert ranks[2].receive(1, "part", 0.01) is None, "it is received once"
    ranks[1].send(2, "part", 0)
    assert ranks[2].receive(1, "part", 30) == 0


def test_all_get_the_first_proposal(coordinations, in_threads):
    ranks = coordinations(3)
    assert ranks[1].propose("stop", 7) == 7
    assert in_threads(lambda rank: ranks[rank].propose("stop", rank), (0, 2)) == [7, 7]


@pytest.mark.parametrize(("late", "workers"), [(0, 2), (1, 2), (0, 3), (2, 3)])
def test_chief_exits_last_and_nobody_before_it_is_ready(
    coordinations, in_threads, key_values, monkeypatch, late, workers
):
    """A worker exits from the moment at which it says so: it may return from that call after the chief has exited."""
    ranks, others = coordinations(workers), [rank for rank in range(workers) if rank != late]
    exited, is_ready, publish = [], threading.Event(), key_values.publish

    def exit_and_say(key, value):
        if "/exits/" in key:
            exited.append(int(key.rpartition("/")[2]))
        publish(key, value)

    def leave(rank):
        if rank == late:
            is_ready.wait(0.3)  # time for the others to exit
            exited.append("late")
        ranks[rank].wait_to_exit()
        if rank == 0:
            exited.append(0)
        if late in (0, rank) or rank == 0:
            is_ready.set()

    monkeypatch.setattr(key_values, "publish", exit_and_say)
    in_threads(leave, (late, *others))
    assert exited[-1] == 0 and exited.index("late") < exited.index(0)
    assert sorted(exited[:-1], key=str) == [*range(1, workers), "late"]
    assert late != 0 or exited[0] == "late"
    assert len(key_values.values) == workers


@pytest.mark.parametrize("slow", ["before_read", "after_write"])
def test_no_worker_needs_the_store_once_the_chief_has_exited(coordinations, in_threads, key_values, slow):
    """The answers to the other workers are slow."""
    ranks, this_thread = coordinations(3), threading.local()
    setattr(key_values, slow, lambda key: this_thread.is_chief or key_values.is_gone.wait(0.3))

    def leave(rank):
        this_thread.is_chief = rank == 0
        ranks[rank].wait_to_exit()
        if rank == 0:
            key_values.is_gone.set()

    in_threads(leave, (0, 1, 2))
    assert key_values.is_gone.is_set()


def test_each_fit_uses_different_names(coordinations, in_threads):
    for value in ("first", "second"):
        ranks = coordinations(2)
        assert in_threads(lambda rank, ranks=ranks, value=value: ranks[rank].broadcast("resume", value), (0, 1)) == [
            value,
            value,
        ]


@pytest.mark.parametrize("value", [None, {"step": 3}])
def test_one_worker_sends_no_messages(coordinations, key_values, value):
    (alone,) = coordinations(1)
    alone.wait_to_exit()
    assert alone.broadcast("resume", value) == value and alone.propose("stop", value) == value
    assert key_values.values == {}


def test_earlier_trainings_of_one_worker_do_not_change_names(monkeypatch, key_values, in_threads):
    """Each rank counts in its own process, and the chief has trained alone before."""
    ranks = []
    for rank, alone in ((0, 2), (1, 0)):
        monkeypatch.setattr(worker_coordination, "_counter", itertools.count())
        for _ in range(alone):
            worker_coordination.WorkerCoordination(0, 1)
        ranks.append(worker_coordination.WorkerCoordination(rank, 2))
    ranks[0].set("resume", 7)
    assert [ranks[1].propose("resume", 8), len(key_values.values)] == [7, 1]
