"""Workers agree on views and steps in every order of messages, and with losses at every point."""

from collections.abc import Iterable

import pytest
from membership.simulated_group import SimulatedGroup, asks_to_leave

from tfdist.membership.agreement import Agreement
from tfdist.membership.decisions import NO_VIEW, Decision, NoMajority, Report, View, decide

# `make test` runs a sample of what `make test-long` runs completely.
SAMPLE = pytest.mark.parametrize("stride", [9, pytest.param(1, marks=pytest.mark.long)])


def _messages(group: SimulatedGroup, events: int, stride: int) -> Iterable[int]:
    """Returns the numbers of the messages of a group to which nothing happens."""
    group.run(events)
    assert group.steps() > 2
    return range(1, group.sent, stride)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_steps_are_committed_by_all(size: int) -> None:
    group = SimulatedGroup(size, seed=size)
    group.run(3000)
    committed = min(worker.agreement.committed for worker in group.workers.values())
    assert committed >= 10
    for step in range(1, committed + 1):
        assert group.leaving.get(step, set()) == {number for number in range(size) if asks_to_leave(number, step)}


@SAMPLE
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_worker_that_ends_at_any_message_costs_a_step(size: int, stride: int) -> None:
    for message in _messages(SimulatedGroup(size, seed=1), 600, stride):
        group = SimulatedGroup(size, seed=1)
        group.kill_at = {message}
        group.run_until(lambda group=group: len(group.workers) == size - 1)
        group.run_until_all_train()


@SAMPLE
@pytest.mark.parametrize("size", [3, 5])
def test_two_workers_that_end_at_any_time(size: int, stride: int) -> None:
    for seed in range(0, 300, stride):
        group = SimulatedGroup(size, seed, answer_seconds=1000.0)  # nobody waits for one that has ended
        first = group.random.randrange(1, 150)
        group.kill_at = {first, first + group.random.randrange(1, 40)}
        group.run_until(lambda group=group: len(group.workers) == size - 2)
        group.run_until_all_train()
        assert group.now < 100.0


@SAMPLE
@pytest.mark.parametrize("victim", [0, 2])
def test_a_worker_that_freezes_at_any_message_is_left_out(victim: int, stride: int) -> None:
    for message in _messages(SimulatedGroup(3, seed=2), 400, stride):
        group = SimulatedGroup(3, seed=2)
        group.run_until(lambda group=group, message=message: group.sent >= message)
        group.stopped = {victim}
        group.run_until_all_train(*({0, 1, 2} - {victim}))
        group.stopped = set()
        group.run_until(lambda group=group: victim not in group.workers)
        group.run_until_all_train()


@SAMPLE
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("directions", ["both", "to", "from"])
def test_a_cut_leaves_one_view(victim: int, directions: str, stride: int) -> None:
    """Also when a worker ends meanwhile, and when the cut is repaired."""
    others = {0, 1, 2, 3, 4} - {victim}
    for message in _messages(SimulatedGroup(5, seed=3), 400, 3 * stride):
        for ends in (None, min(others), max(others)):
            group = SimulatedGroup(5, seed=3)
            group.run_until(lambda group=group, message=message: group.sent >= message)
            group.separate({victim}, others)
            if directions != "both":
                place = 1 if directions == "to" else 0
                group.cut = {pair for pair in group.cut if pair[place] == victim}
            if ends is not None:
                group.kill(ends)
            group.run_until_all_train(*(others - {ends}))
            group.separate()
            group.run_until(lambda group=group: victim not in group.workers)
            group.run_until_all_train()


@SAMPLE
def test_of_two_halves_that_with_the_oldest_worker_trains_on(stride: int) -> None:
    for message in _messages(SimulatedGroup(4, seed=4), 400, stride):
        group = SimulatedGroup(4, seed=4)
        group.run_until(lambda group=group, message=message: group.sent >= message)
        group.separate({0, 3}, {1, 2})
        group.run_until_all_train(0, 3)
        group.run_until(lambda group=group: all(group.workers[number].agreement.obstacle for number in (1, 2)))
        assert {group.workers[number].agreement.obstacle.members for number in (1, 2)} == {(0, 1, 2, 3)}
        group.separate()
        group.run_until(lambda group=group: {*group.workers} == {0, 3})


def test_a_worker_that_was_left_out_does_not_train_on_when_the_others_end() -> None:
    """Of those without which it could not go on, one has ended since they went on without it."""
    group = SimulatedGroup(3, seed=6)
    group.run(300)
    group.separate({0}, {1, 2})
    group.run_until_all_train(1, 2)
    group.queues[2, 0].clear()  # a connection that breaks may lose what was sent
    group.kill(2)
    group.cut = {(0, 1), (1, 0)}
    group.run_until_all_train(1)
    group.run_until(lambda: group.workers[0].agreement.obstacle is not None)
    group.run(3000)
    group.separate()
    group.run_until(lambda: {*group.workers} == {1})


@SAMPLE
@pytest.mark.parametrize("victim", [0, 1, 3])
def test_two_workers_join_and_a_worker_ends_at_any_message(victim: int, stride: int) -> None:
    def started() -> SimulatedGroup:
        group = SimulatedGroup(3, seed=5)
        group.run(100)
        group.join(3)
        group.join(4)
        return group

    undisturbed = started()
    begin = undisturbed.sent
    undisturbed.run_until_all_train(0, 1, 2, 3, 4)
    for message in range(begin, undisturbed.sent + 1, stride):
        group = started()
        group.run_until(lambda group=group, message=message: group.sent >= message)
        group.kill(victim)
        group.run_until_all_train(*({0, 1, 2, 3, 4} - {victim}))


@SAMPLE
def test_two_oldest_workers_that_do_not_hear_each_other_both_propose(stride: int) -> None:
    for message in _messages(SimulatedGroup(5, seed=7), 300, stride):
        group = SimulatedGroup(5, seed=7)
        group.run_until(lambda group=group, message=message: group.sent >= message)
        group.cut = {(0, 1), (1, 0)}
        group.run_until(lambda group=group: len(group.workers) == 4)
        group.run_until_all_train()
        assert not {0, 1} <= {*group.workers}


@SAMPLE
def test_a_view_that_was_accepted_counts_as_one_that_has_begun(stride: int) -> None:
    for seed in range(0, 200, stride):
        group = SimulatedGroup(5, seed)
        group.run(300)
        group.separate({0, 1, 2}, {3, 4})
        group.asked_to_accept = set()
        group.run_until(lambda group=group: 2 in group.asked_to_accept)
        group.separate({0, 1}, {2, 3, 4})
        group.run(2500)
        group.separate()
        group.run(3000)
        group.run_until_all_train()


@SAMPLE
def test_everything_at_random(stride: int) -> None:
    for seed in range(0, 300, stride):
        group = SimulatedGroup(4, seed)
        joined = 4
        for _ in range(8):
            group.run(group.random.randrange(600))
            choice, living = group.random.randrange(6), sorted(group.workers)
            if not living:
                break
            if choice == 0 and len(group.trained()) > 1:
                group.kill(group.random.choice(living))
            elif choice == 1:
                group.join(joined)
                joined += 1
            elif choice == 2:
                group.stopped = {group.random.choice(living)}
            elif choice == 3:
                side = {number for number in living if group.random.random() < 0.5}
                group.separate(side, {*living} - side)
            elif choice == 4:
                group.cut = {(a, b) for a in living for b in living if group.random.random() < 0.15}
            else:
                group.cut, group.stopped = set(), set()
        group.cut, group.stopped = set(), set()
        group.run(3000)
        if group.trained():  # the others may have ended without those that they left out
            group.run_until_all_train()


def test_a_step_without_exchanges_is_committed_in_any_order() -> None:
    """The next step of one worker may be known before this step of another one."""
    sent: list[tuple[int, dict]] = []
    view = View((1, 0), (0, 1, 2))
    agreement = Agreement(0, view, lambda worker, message: sent.append((worker, message)), ranks=3)
    agreement.has_sums()
    for sender, step in ((1, 1), (1, 2), (2, 1), (2, 2)):
        agreement.receive(sender, {"ready": step, "ballot": [1, 0], "plan": False}, 0.0)
    assert agreement.committed == 1
    agreement.has_sums()
    assert agreement.committed == 2


def test_a_member_that_has_promised_a_proposal_says_ready_no_more() -> None:
    """Who has not promised it may be left out, and would commit a step that the others compute again."""
    sent: list[tuple[int, dict]] = []
    view = View((1, 0), (0, 1, 2))
    agreement = Agreement(1, view, lambda worker, message: sent.append((worker, message)), ranks=3)
    agreement.receive(0, {"prepare": [1], "ballot": [2, 0]}, 0.0)
    agreement.has_sums()
    assert [[*message][0] for _, message in sent] == ["promise"]
    agreement.receive(0, {"accept": {"ballot": [2, 0], "members": [0, 1]}, "step": 0, "ballot": [2, 0]}, 0.0)
    agreement.receive(0, {"install": True, "ballot": [2, 0]}, 0.0)
    agreement.has_sums()
    assert [(worker, message["ballot"]) for worker, message in sent if "ready" in message] == [(0, (2, 0))]


def test_a_worker_that_is_left_out_reports_nobody_who_ends() -> None:
    """It has received `exclude` of the others before they end; whom it informs may not have."""
    sent: list[tuple[int, dict]] = []
    view = View((1, 0), (0, 1, 2))
    agreement = Agreement(1, view, lambda worker, message: sent.append((worker, message)), ranks=3)
    agreement.receive(0, {"exclude": True, "ballot": [2, 0]}, 0.0)
    agreement.has_ended(0)
    assert agreement.is_excluded and not sent


def test_a_worker_that_has_ended_for_the_others_learns_that_it_is_not_taken_in() -> None:
    sent: list[tuple[int, dict]] = []
    agreement = Agreement(0, View((1, 0), (0,)), lambda worker, message: sent.append((worker, message)), ranks=3)
    agreement.connects(10)
    agreement.has_ended(10)
    agreement.receive(10, {"joins": 0}, 0.0)
    agreement.has_sums()
    assert not agreement.joining and not agreement.is_changing
    assert [(worker, "exclude" in message) for worker, message in sent] == [(10, True)]


def test_who_joins_takes_the_place_of_nobody() -> None:
    view = View((2, 0), (0, 9))
    reports = {0: Report(view), 5: Report(NO_VIEW, silent=frozenset([9])), 9: Report(view, silent=frozenset([5]))}
    assert decide((3, 0), reports) == Decision(View((3, 0), (0, 9)), 0)


def test_who_joins_has_the_step_that_others_commit_in_the_next_view() -> None:
    view = View((2, 0), (0, 1))
    reports = {
        0: Report(view, committed=7, is_ready=True),
        1: Report(view, committed=8),
        5: Report(NO_VIEW, committed=7),
    }
    assert decide((3, 0), reports) == Decision(View((3, 0), (0, 1)), 8)
    assert decide((3, 0), {**reports, 5: Report(NO_VIEW, committed=8)}).view.members == (0, 1, 5)


def test_a_view_that_some_have_accepted_needs_a_majority_too() -> None:
    view, accepted = View((1, 0), (0, 1, 2, 3, 4)), View((2, 0), (0, 1, 2))
    reports = {2: Report(view, (accepted,)), 3: Report(view), 4: Report(view)}
    assert decide((3, 2), reports) == NoMajority((0, 1, 2), (2,), ())
    assert decide((3, 2), {number: Report(view) for number in reports}) == Decision(View((3, 2), (2, 3, 4)), 0)


def test_a_worker_that_joins_is_no_witness_of_an_end() -> None:
    """It may not have received `exclude` of the one that has ended, which members have."""
    view, sent = View((1, 0), (0, 1)), []
    reports = {1: Report(view, silent=frozenset([0])), 5: Report(NO_VIEW, ended=frozenset([0]))}
    assert decide((2, 1), reports) == NoMajority((0, 1), (1,), ())
    agreement = Agreement(1, view, lambda worker, message: sent.append((worker, message)), ranks=3)
    agreement.connects(5)
    agreement.joining[5] = 0
    agreement.does_not_reach(0)
    agreement.tick(1.0)
    agreement.receive(5, {"promise": reports[5].as_json(), "ballot": [2, 1]}, 1.0)
    assert agreement.obstacle == NoMajority((0, 1), (1,), ())


def test_a_worker_that_ends_after_its_promise_is_not_chosen() -> None:
    view, sent = View((1, 0), (0, 1, 2, 3)), []
    agreement = Agreement(0, view, lambda worker, message: sent.append((worker, message)), ranks=4)
    agreement.has_ended(1)
    agreement.tick(1.0)
    for worker in (2, 3):
        if worker == 3:
            agreement.has_ended(2)
        promise = {"promise": Report(view).as_json(), "ballot": [2, 0]}
        agreement.receive(worker, promise, 1.0)
    assert [message["accept"]["members"] for _, message in sent if "accept" in message] == [[0, 3]]


def test_a_member_that_has_promised_another_proposal_needs_a_new_view() -> None:
    agreement = Agreement(0, View((2, 0), (0, 1)), lambda worker, message: None, ranks=2)
    agreement.receive(1, {"suspect": [], "ballot": [1, 0], "promised": [2, 0]}, 0.0)
    assert not agreement.is_changing, "it has only not heard yet that the view begins"
    agreement.receive(1, {"suspect": [], "ballot": [1, 0], "promised": [3, 1]}, 0.0)
    assert agreement.is_changing
