"""Workers that agree, on a simulated network: any order of messages, losses at any point, and what they compute."""

import collections
import random
from collections.abc import Callable, Collection
from typing import Any

from tfdist.membership.agreement import Agreement
from tfdist.membership.decisions import NO_VIEW, View

_TICK_SECONDS = 0.02
_SILENCE_SECONDS = 0.5
_RANKS = 10**6  # each worker has another one


def asks_to_leave(number: int, step: int) -> bool:
    """Whether a worker says with a step that it would leave. It stays: here only who knows that matters."""
    return (3 * number + step) % 5 == 0


class SimulatedWorker:
    """Computes steps: contributes to the sums of its view, waits for all contributions, commits.

    Its state is the list of the views whose sums it has applied, so that a step that is lost, applied twice, or applied
    with other sums than elsewhere makes a difference.
    """

    def __init__(self, group: "SimulatedGroup", number: int, view: View) -> None:
        self.group, self.number = group, number
        self.agreement = Agreement(number, view, self._send, ranks=_RANKS, answer_seconds=group.answer_seconds)
        self.state: list[tuple[int, int]] = []
        self.contributed: set[int] = set()  # workers whose part of the next step has arrived, in this view
        self.early: list[tuple[int, tuple[int, int], int]] = []
        self.has_contributed = False
        self.view_of_sums: tuple[int, int] | None = None
        self.has_said = False  # that it has the sums: it does so some time after they have arrived

    def _send(self, worker: int, message: dict[str, Any]) -> None:
        self.group.send(self.number, worker, message)

    def can_compute(self) -> bool:
        agreement = self.agreement
        trains = self.number in agreement.view.members and not agreement.is_excluded
        return trains and not self.has_contributed and not agreement.is_changing and self.view_of_sums is None

    def can_say(self) -> bool:
        return self.view_of_sums == self.agreement.view.ballot and not self.has_said and not self.agreement.is_excluded

    def say(self) -> None:
        """Says that it has the sums, also when the view is about to end."""
        before = self.agreement.view, self.agreement.committed
        self.has_said = True
        self.agreement.leaves = asks_to_leave(self.number, self.agreement.committed + 1)
        self.agreement.has_sums()
        if self.number in self.group.workers:
            self.follow(before)

    def compute(self) -> None:
        """Contributes to the next step."""
        self.has_contributed = True
        view = self.agreement.view
        message = {"data": self.agreement.committed + 1, "ballot": list(view.ballot)}
        for worker in view.members:
            if worker != self.number:
                self.group.send(self.number, worker, message)
        before = view, self.agreement.committed
        self._take_data(self.number, view.ballot, self.agreement.committed + 1)
        if self.number in self.group.workers:
            self.follow(before)

    def take(self, sender: int, message: dict[str, Any]) -> None:
        """Takes a message from the network."""
        before = self.agreement.view, self.agreement.committed
        if "data" in message:
            ballot = (message["ballot"][0], message["ballot"][1])
            if ballot > self.agreement.view.ballot:
                self.early.append((sender, ballot, message["data"]))
            else:
                self._take_data(sender, ballot, message["data"])
        elif "state" in message:
            # A worker that was left out may answer, too; who has promised to begin with a step does not go back.
            if self.number not in self.agreement.view.members and len(message["state"]) >= len(self.state):
                self.state = [*message["state"]]
                assert self.state == self.group.history[: len(self.state)], (self.number, self.state)
                self.agreement.joins_with(len(self.state))
                self._send(sender, {"joins": len(self.state)})
        else:
            self.agreement.receive(sender, message, self.group.now)
        self.follow(before)

    def _take_data(self, sender: int, ballot: tuple[int, int], step: int) -> None:
        agreement = self.agreement
        if ballot != agreement.view.ballot or agreement.is_changing:
            return  # the exchanges of an earlier view, or of one that ends, are interrupted
        if step == agreement.committed + 2:  # it waits in the connection
            self.early.append((sender, ballot, step))
            return
        assert step == agreement.committed + 1, (self.number, sender, step, agreement.committed)
        self.contributed.add(sender)
        if self.contributed.issuperset(agreement.view.members):
            self.view_of_sums, self.has_said = agreement.view.ballot, False

    def follow(self, before: tuple[View, int]) -> None:
        """Does what follows from a change of the agreement."""
        agreement = self.agreement
        view, committed = before
        joined = view == NO_VIEW
        if agreement.committed > committed and not joined and agreement.committed > len(self.state):
            assert self.view_of_sums is not None
            self.state.append(self.view_of_sums)
            self.group.commits(self.number, len(self.state), self.view_of_sums)
            self.group.leave(len(self.state), view, agreement.leaving)
            self.contributed, self.has_contributed, self.view_of_sums = set(), False, None
            for worker in agreement.joining:
                self.send_state(worker)
        if agreement.view != view:
            self.contributed, self.has_contributed, self.view_of_sums = set(), False, None
        if (agreement.view, agreement.committed) != before:
            early, self.early = self.early, []
            for sender, ballot, step in early:
                if ballot == agreement.view.ballot:
                    now = agreement.view, agreement.committed
                    self._take_data(sender, ballot, step)
                    self.follow(now)
        assert len(self.state) == agreement.committed, (self.number, len(self.state), agreement.committed)

    def send_state(self, worker: int) -> None:
        """Sends the state to a worker that joins."""
        if min(self.agreement.view.members, default=-1) == self.number:
            self._send(worker, {"state": list(self.state)})


class SimulatedGroup:
    """Some workers, and the messages between them, which arrive in any order but that of one pair.

    What a worker commits must be what all others commit in that step, those that end or are left out, too.

    Args:
        size: The number of workers that begin.
        seed: Of the order of all events.
        answer_seconds: See `Agreement`.
    """

    def __init__(self, size: int, seed: int, answer_seconds: float = 0.5) -> None:
        self.answer_seconds = answer_seconds
        self.random, self.now = random.Random(seed), 0.0
        view = View((1, 0), tuple(range(size)))
        self.queues: dict[tuple[int, int], collections.deque[dict[str, Any]]] = {}
        self.cut: set[tuple[int, int]] = set()  # senders and receivers between whom messages wait
        self.stopped: set[int] = set()
        self.heard_at: dict[tuple[int, int], float] = {}  # receiver and sender
        self.asked_to_accept: set[int] = set()
        self.history: list[tuple[int, int]] = []  # of the state of all
        self.workers: dict[int, SimulatedWorker] = {}
        self.dead: dict[int, SimulatedWorker] = {}
        self.leaving: dict[int, set[int]] = {}  # after each step, as far as anybody knows
        self.sent = 0
        self.kill_at: set[int] = set()  # numbers of messages: who sends one of them ends before it has sent it
        for number in range(size):
            self.workers[number] = SimulatedWorker(self, number, view)

    def send(self, sender: int, receiver: int, message: dict[str, Any]) -> None:
        """Puts a message on the way, unless its sender ends now."""
        if sender not in self.workers:
            return
        self.sent += 1
        if self.sent in self.kill_at:
            self.kill(sender)
            return
        self.queues.setdefault((sender, receiver), collections.deque()).append(message)

    def kill(self, number: int) -> None:
        """Ends a worker: what it has sent still arrives, then its connections close."""
        if number not in self.workers:
            return
        self.dead[number] = self.workers.pop(number)
        self.stopped.discard(number)
        for other in self.workers:
            self.queues.setdefault((number, other), collections.deque()).append({"ended": True})

    def commits(self, number: int, step: int, view: tuple[int, int]) -> None:
        """Checks that a worker commits the same sums as all others."""
        if step == len(self.history) + 1:
            self.history.append(view)
        assert self.history[step - 1] == view, (number, step, view, self.history[step - 1])

    def leave(self, step: int, view: View, leaving: Collection[int]) -> None:
        """Checks that who knows who leaves after a step of a view knows all of them, as all others do."""
        if leaving:
            self.leaving[step] = set(leaving)
            assert set(leaving) == {number for number in view.members if asks_to_leave(number, step)}, (step, leaving)

    def separate(self, *sides: Collection[int]) -> None:
        """Cuts all connections between workers of different sides; without sides, none."""
        self.cut = {(a, b) for one in sides for other in sides if one != other for a in one for b in other}

    def join(self, number: int) -> None:
        """Starts a worker that joins."""
        joins = self.workers[number] = SimulatedWorker(self, number, NO_VIEW)
        for other in self.workers.values():
            other.agreement.connects(number)
            joins.agreement.connects(other.number)
        self._ask_for_state(number)

    def _ask_for_state(self, number: int) -> None:
        for other in [*self.workers]:
            if other != number:
                self.send(number, other, {"joins": -1})

    def run(self, events: int) -> None:
        """Runs a number of events in a random order."""
        for _ in range(events):
            self.event()

    def event(self) -> None:
        """Delivers a message, computes a step, or lets time pass."""
        open_pairs = [pair for pair, queue in self.queues.items() if queue and pair not in self.cut]
        waiting = [pair for pair in open_pairs if pair[1] not in self.stopped]
        running = [worker for worker in self.workers.values() if worker.number not in self.stopped]
        can_compute = [worker for worker in running if worker.can_compute()]
        can_say = [worker for worker in running if worker.can_say()]
        choice = self.random.random()
        if waiting and choice < 0.7:
            self._deliver(*self.random.choice(sorted(waiting)))
        elif can_say and choice < 0.85:
            self.random.choice(can_say).say()
        elif can_compute and choice < 0.95:
            self.random.choice(can_compute).compute()
        else:
            self._pass_time()
        for worker in [*self.workers.values()]:
            if worker.agreement.is_excluded:
                self.kill(worker.number)

    def _pass_time(self) -> None:
        self.now += _TICK_SECONDS
        for worker in [*self.workers.values()]:
            if worker.number in self.stopped or worker.number not in self.workers:
                continue
            before = worker.agreement.view, worker.agreement.committed
            if worker.agreement.view == NO_VIEW and self.random.random() < 0.02:
                self._ask_for_state(worker.number)
            self._listen(worker)
            if worker.number in self.workers:
                worker.agreement.tick(self.now)
            if worker.number in self.workers:
                worker.follow(before)

    def _listen(self, worker: SimulatedWorker) -> None:
        """Notices who is silent."""
        for other in [*self.workers]:
            pair = worker.number, other
            if other == worker.number:
                continue
            if other not in self.stopped and (other, worker.number) not in self.cut:
                self.heard_at[pair] = self.now
                worker.agreement.reaches(other)
            elif self.now > self.heard_at.setdefault(pair, self.now) + _SILENCE_SECONDS:
                worker.agreement.does_not_reach(other)

    def _deliver(self, sender: int, receiver: int) -> None:
        message = self.queues[sender, receiver].popleft()
        worker = self.workers.get(receiver)
        if worker is None:
            return
        worker.agreement.reaches(sender)
        if "accept" in message:
            self.asked_to_accept.add(receiver)
        if "ended" in message:
            before = worker.agreement.view, worker.agreement.committed
            worker.agreement.has_ended(sender)
            if receiver in self.workers:
                worker.follow(before)
        elif message.get("joins") == -1:
            worker.agreement.joining.setdefault(sender, -1)
            worker.send_state(sender)
        else:
            worker.take(sender, message)

    def steps(self) -> int:
        """The number of steps that the survivors have committed."""
        return max((worker.agreement.committed for worker in self.workers.values()), default=0)

    def trained(self) -> set[int]:
        """The workers that live and are members of their view."""
        return {number for number, worker in self.workers.items() if number in worker.agreement.view.members}

    def run_until(self, is_so: Callable[[], bool], most_events: int = 60_000) -> None:
        """Runs until something is so."""
        for _ in range(most_events):
            if is_so():
                return
            self.event()
        raise AssertionError(self.described())

    def run_until_all_train(self, *numbers: int) -> None:
        """Runs until the workers, by default all that live, have one view, and commit further steps."""
        expected = set(numbers)

        def train_together() -> bool:
            workers = [self.workers.get(number) for number in expected or [*self.workers]]
            views = {worker.agreement.view for worker in workers if worker is not None}
            return None not in workers and len(views) == 1 and set(views.pop().members) == (expected or {*self.workers})

        self.run_until(train_together)
        steps = self.steps() + 2
        self.run_until(lambda: train_together() and self.steps() >= steps)

    def described(self) -> list[Any]:
        """What is to be seen of a group that hangs."""
        workers = [worker.agreement for worker in self.workers.values()]
        return [(one.own, one.view, one.committed, one.is_changing, one.obstacle, one.joining) for one in workers]
