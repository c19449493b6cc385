"""Workers agree on views and steps in every order of messages, and with losses at every point."""

import pytest
from membership.simulated_group import SimulatedGroup


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_steps_are_committed_by_all(size):
    group = SimulatedGroup(size, seed=size)
    group.run(3000)
    assert min(worker.agreement.committed for worker in group.workers.values()) >= 10


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_worker_that_ends_at_any_message_costs_a_step(size):
    undisturbed = SimulatedGroup(size, seed=1)
    undisturbed.run(600)
    for victim_message in range(1, undisturbed.sent):
        group = SimulatedGroup(size, seed=1)
        group.kill_at = {victim_message: 1}
        group.run(700)
        before = group.steps()
        group.run(700)
        assert len(group.workers) == size - 1, victim_message
        assert group.steps() > before, victim_message


@pytest.mark.parametrize("size", [3, 5])
def test_two_workers_that_end_at_any_time(size):
    for seed in range(300):
        group = SimulatedGroup(size, seed)
        first = group.random.randrange(1, 150)
        group.kill_at = {first: 1, first + group.random.randrange(1, 40): 1}
        group.run(1500)
        before = group.steps()
        group.run(1200)
        assert len(group.workers) == size - 2, seed
        assert group.steps() > before, seed


def test_workers_join_and_end():
    for seed in range(200):
        group = SimulatedGroup(3, seed)
        group.run(group.random.randrange(300))
        joined = 3
        for _ in range(6):
            trains = [number for number, worker in group.workers.items() if number in worker.agreement.view.members]
            if group.random.random() < 0.5 and len(trains) > 1:
                group.kill(group.random.choice(sorted(group.workers)))
            else:
                group.join(joined)
                joined += 1
            group.run(group.random.randrange(800))
        group.run(5000)
        before = group.steps()
        group.run(1500)
        assert group.steps() > before, seed
        views = {worker.agreement.view for worker in group.workers.values()}
        assert len(views) == 1 and set(views.pop().members) == set(group.workers), seed
