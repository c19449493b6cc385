"""Notices of Ray Train: all workers ask after the same steps, and save once for each notice."""

import logging
import sys
import types

import numpy as np
import pytest

from tfdist.recovery.preemption import RayTrainNotices


class Notice(types.SimpleNamespace):
    """As `ray.train.PreemptionInfo`."""


def notice(*nodes, deadline_ms=None):
    return Notice(preempted_node_ids=list(nodes), preempted_ranks=[1], deadline_ms=deadline_ms)


def test_every_new_notice_is_due_once(coordinations, clock, caplog):
    answers = [None, None, notice("a"), notice("a"), notice("a", "b"), notice("a", "b")]
    notices, due = RayTrainNotices(lambda: answers.pop(0), coordinations(1)[0], 10), []
    with caplog.at_level(logging.WARNING, "tfdist"):
        for step in range(11, 100):
            clock.now += 5
            if notices.is_due(step):
                due.append(step)
            if not answers:
                break
    assert due == [13, 15]
    assert [record.getMessage() for record in caplog.records] == [
        f"FailureRecovery saves after step {step}: Ray Train will lose the nodes {nodes}, with the ranks 1, soon. "
        "Training continues until Ray Train restarts it on other nodes."
        for step, nodes in ((13, "a"), (15, "a, b"))
    ]


def test_it_asks_every_few_seconds_and_not_after_every_step(coordinations, clock):
    asked = []
    notices = RayTrainNotices(lambda: asked.append(clock.now), coordinations(1)[0], 0)
    for step in range(1, 61):
        clock.now += 1
        notices.is_due(step)
    assert 10 <= len(asked) <= 12 and min(np.diff(asked)) >= 5


def test_workers_ask_after_the_same_steps_whatever_their_clocks_say(coordinations, clock, in_threads):
    questions, now = {0: [], 1: []}, {}
    made = [
        RayTrainNotices(lambda rank=rank: questions[rank].append(now[rank]), coordination, 0)
        for rank, coordination in enumerate(coordinations(2))
    ]

    def train(rank):
        for step in range(1, 60):
            now[rank] = step
            clock.now += 0.3 + rank
            assert not made[rank].is_due(step)

    in_threads(train, (0, 1))
    assert questions[0] == questions[1] != []


def context_of(world_size):
    def get_context():
        if world_size is None:
            raise RuntimeError("`get_context` cannot be used outside of a Ray Train training function.")
        return types.SimpleNamespace(get_world_size=lambda: world_size)

    return get_context


@pytest.mark.parametrize(
    ("train", "given"),
    [
        (None, False),
        (types.SimpleNamespace(get_context=context_of(2)), False),
        (types.SimpleNamespace(get_context=context_of(None), get_preemption_info=lambda: None), False),
        (types.SimpleNamespace(get_context=context_of(4), get_preemption_info=lambda: None), False),
        (types.SimpleNamespace(get_context=context_of(2), get_preemption_info=lambda: None), True),
    ],
    ids=["no Ray", "an older Ray", "a driver", "workers of several trainings", "workers of this training"],
)
def test_who_gets_notices(coordinations, monkeypatch, train, given):
    if train is None:
        monkeypatch.delitem(sys.modules, "ray.train", raising=False)
    else:
        monkeypatch.setitem(sys.modules, "ray.train", train)
    assert RayTrainNotices.of_this_worker(0, 2, 0).are_given == given
    assert given or not RayTrainNotices.of_this_worker(0, 2, 0).is_due(1)
