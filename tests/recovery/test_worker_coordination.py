"""Coordination of the workers of a training. Each worker is a thread here."""

import itertools
import threading

import pytest

from tfdist.recovery import worker_coordination


def test_all_get_the_value_of_the_chief(coordinations, in_threads):
    ranks = coordinations(3)
    assert in_threads(lambda rank: ranks[rank].broadcast("resume", [rank, "name"]), (2, 1, 0)) == [[0, "name"]] * 3


def test_all_get_the_first_proposal(coordinations, in_threads):
    ranks = coordinations(3)
    assert ranks[1].propose("stop", 7) == 7
    assert in_threads(lambda rank: ranks[rank].propose("stop", rank), (0, 2)) == [7, 7]


def test_a_barrier_waits_for_all(coordinations, in_threads, key_values):
    ranks, left, came = coordinations(2), threading.Event(), []

    def meet(rank):
        if rank == 1:
            ranks[0].wait_for("saved/0")  # the other has come
            left.wait(0.3)  # and could leave
            came.append(rank)
        ranks[rank].barrier("saved")
        left.set()
        return list(came)

    assert in_threads(meet, (0, 1)) == [[1], [1]]
    assert len(key_values.values) == 2


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
    alone.barrier("saved")
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
