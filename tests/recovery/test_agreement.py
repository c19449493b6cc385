"""What the workers of a training agree on, each a thread here."""

import itertools
import threading

import pytest

from tfdist.recovery import agreement


def test_all_hear_what_the_chief_says(agreements, in_threads):
    ranks = agreements(3)
    assert in_threads(lambda rank: ranks[rank].from_chief("resume", [rank, "name"]), (2, 1, 0)) == [[0, "name"]] * 3


def test_all_hear_what_is_said_first(agreements, in_threads):
    ranks = agreements(3)
    assert ranks[1].first("stop", 7) == 7
    assert in_threads(lambda rank: ranks[rank].first("stop", rank), (0, 2)) == [7, 7]


def test_nobody_leaves_a_meeting_before_all_have_come(agreements, in_threads, told):
    ranks, left, came = agreements(2), threading.Event(), []

    def meet(rank):
        if rank == 1:
            ranks[0].hear("saved/0")  # the other has come
            left.wait(0.3)  # and could leave
            came.append(rank)
        ranks[rank].meet("saved")
        left.set()
        return list(came)

    assert in_threads(meet, (0, 1)) == [[1], [1]]
    assert len(told.values) == 2


def test_every_fit_has_names_of_its_own(agreements, in_threads):
    for value in ("first", "second"):
        ranks = agreements(2)
        assert in_threads(lambda rank, ranks=ranks, value=value: ranks[rank].from_chief("resume", value), (0, 1)) == [
            value,
            value,
        ]


@pytest.mark.parametrize("value", [None, {"step": 3}])
def test_one_worker_asks_nobody(agreements, told, value):
    (alone,) = agreements(1)
    alone.meet("saved")
    assert alone.from_chief("resume", value) == value and alone.first("stop", value) == value
    assert told.values == {}


def test_what_one_has_trained_alone_before_changes_no_names(monkeypatch, told, in_threads):
    """As a chief does that has trained without the others: each rank counts in a process of its own."""
    ranks = []
    for rank, alone in ((0, 2), (1, 0)):
        monkeypatch.setattr(agreement, "_agreements", itertools.count())
        for _ in range(alone):
            agreement.Agreement(0, 1)
        ranks.append(agreement.Agreement(rank, 2))
    ranks[0].tell("resume", 7)
    assert [ranks[1].first("resume", 8), len(told.values)] == [7, 1]
