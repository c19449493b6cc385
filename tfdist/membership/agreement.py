"""One worker's part in the agreement about views and steps: messages and times in, messages out.

It has no thread, no connection and no clock, so tests can run every order of events. The protocol:

1. A step: who has all sums of the next step says `ready` to the members of its view. Who has received that of all
   members commits the step.
2. A change: who loses a worker, or receives that another one has, promises nothing yet, and waits for a proposal of the
   oldest member that it reaches. That member sends `prepare` with a new ballot; the others `promise` it, with a report.
   From then on they neither commit nor say `ready` in their view. It decides (`decisions.decide`) and sends `accept`;
   when all members of the next view have accepted, it sends `exclude` to the others, and then `install`. Who begins the
   view sends `exclude` first, too.
3. If the proposer, or one whom it has chosen, is lost meanwhile: again from 2 with a higher ballot.
"""

from collections.abc import Callable, Iterable
from typing import Any

from tfdist.membership.decisions import NO_VIEW, Ballot, Decision, NoMajority, Report, View, decide

# A worker that joins is taken in when it is at most one step behind; or, if it repeats steps no faster than the others
# make them, so many reports later, when the others wait for it.
_PATIENT_REPORTS, _LONGEST_LAG = 8, 32
_REPEAT_SECONDS = 0.3
_REPLAY_SECONDS = 30.0  # how long a proposer waits for a worker that joins, and repeats its last steps
_REFUSED_SECONDS = 2.0  # for which a worker that could not be taken in is not asked again

Send = Callable[[int, dict[str, Any]], None]


class Agreement:
    """What one worker knows about the others, and what it has promised.

    Args:
        own: The number of this worker.
        view: The first view; `NO_VIEW` for a worker that joins.
        send: Sends a message to a worker. Messages between two workers keep their order, or the connection ends.
        ranks: The number of ranks. The rank of a worker is the remainder of its number; no two members have the same.
        committed: The last step of which this worker has the state.
        answer_seconds: How long a proposer waits for a worker that it reaches, and that may not reach it.

    Attributes:
        view: The view in which this worker trains.
        committed: The last step that it has committed.
        is_ready: Whether it has all sums of the next step, and waits until the others have them.
        is_changing: Whether it waits for another view: it must not wait for exchanges of this one.
        is_excluded: Whether the others continue without it.
        obstacle: Why nothing can be decided at the moment; `None` otherwise.
        joining: Workers that join, and the last step that they have.
        leaves: Whether this worker asks to leave; it says so with its next `ready`.
        leaving: The members that had asked to leave before the last step. All that have committed it by `ready` of all
            have the same ones; empty after a step that a change has committed.
        refusals: How often the others have begun a view without this worker, which joins.
    """

    def __init__(
        self, own: int, view: View, send: Send, *, ranks: int, committed: int = 0, answer_seconds: float = 2.0
    ) -> None:
        self.own, self.view, self.committed = own, view, committed
        self.is_ready = self.is_changing = self.is_excluded = False
        self.leaves, self.leaving = False, frozenset[int]()
        self._leave: set[int] = set()  # members that leave after the next step
        self.obstacle: NoMajority | None = None
        self.joining: dict[int, int] = {}
        self._lags: dict[int, tuple[int, int]] = {}  # of those: the least lag, in steps, and the reports since then
        self.refusals = 0
        self._send_to, self._ranks, self._answer_seconds = send, ranks, answer_seconds
        self._now = 0.0
        self._refused_until: dict[int, float] = {}
        self._leader: int | None = None
        # Workers that are reached, and propose nothing: they may not reach this one. Until when they count as silent.
        self._idle: dict[int, float] = {}
        self._proposes_until = 0.0  # when the leader counts as idle
        self._connected = set(view.members)
        self._promised: Ballot = view.ballot
        self._highest = view.ballot[0]
        self._attempts: list[View] = []
        self._accepted: Decision | None = None
        self._ended: set[int] = set()
        self._silent: set[int] = set()
        self._ready: set[int] = set()  # members that have all sums of the next step
        self._early_ready: list[tuple[int, dict[str, Any]]] = []  # of later steps or views
        self._plans_change = False
        # As a proposer:
        self._asked: set[int] = set()
        self._asked_to_join: set[int] = set()
        self._reports: dict[int, Report] | None = None
        self._decision: Decision | None = None
        self._has_accepted: set[int] = set()
        self._repeat_at = self._proposed_at = 0.0

    # What happens on this worker.

    def has_sums(self) -> None:
        """This worker has all sums of the next step."""
        self.is_ready = True
        plans = self._is_oldest() and bool(self._can_take_in()) and not self.is_changing
        self._plans_change |= plans
        self._ready.add(self.own)
        leaves = self.leaves
        if leaves:
            self._leave.add(self.own)
        if self._promised == self.view.ballot:  # otherwise others may commit what its report has not announced
            message = {"ready": self.committed + 1, "ballot": self.view.ballot, "plan": self._plans_change}
            self._send_to_all(self.view.members, {**message, "leaves": True} if leaves else message)
        self._commit_if_all_are_ready()

    def connects(self, worker: int) -> None:
        """There is a connection to another worker, which joins or takes in this one."""
        self._connected.add(worker)

    def reaches(self, worker: int) -> None:
        """A message of a worker has arrived, which may have been silent."""
        if worker in self._connected and self._now >= self._idle.get(worker, 0.0):
            self._silent.discard(worker)

    def is_reached(self, worker: int) -> bool:
        """Returns whether there is a connection to another worker, and it is not silent."""
        return worker in self._connected - self._silent - self._ended

    def does_not_reach(self, worker: int) -> None:
        """A worker is silent for too long: it is frozen, or its link is cut."""
        if worker not in self._silent and worker not in self._ended:
            self._silent.add(worker)
            self._miss(worker)

    def loses_connection(self, worker: int) -> None:
        """The connection to a worker is broken, which does not prove that its process has ended."""
        self.joining.pop(worker, None)
        self._connected.discard(worker)
        self.does_not_reach(worker)

    def exchange_fails(self) -> None:
        """An exchange in this view has failed although all members are reached: they begin another view."""
        if self.own in self.view.members and not self.is_changing:
            self.is_changing = True
            self._send_to_all(self.view.members, self._suspicion())

    def has_ended(self, worker: int) -> None:
        """The process of a worker has certainly ended."""
        self.joining.pop(worker, None)
        self._connected.discard(worker)
        if worker not in self._ended:
            self._ended.add(worker)
            self._miss(worker)

    def tick(self, now: float) -> None:
        """Time has passed: repeats what may have been lost, and proposes where the proposer is lost."""
        self._now = now
        if self.is_excluded or not self.is_changing:
            return
        leader = self._find_leader()
        if leader != self._leader:
            self._leader, self._proposes_until = leader, now + 2 * self._answer_seconds
        if leader != self.own:
            self._drop_proposal()
            if leader is not None and now > self._proposes_until:
                self._idle[leader] = now + 4 * self._answer_seconds
                self.does_not_reach(leader)
                return
            if now >= self._repeat_at and leader is not None:
                self._repeat_at = now + _REPEAT_SECONDS
                self._send_to(leader, self._suspicion())
            return
        if self._reports is not None and now > self._proposed_at + self._answer_seconds:
            self._give_up_waiting(now)
        if self._reports is None and now >= self._repeat_at:
            self._repeat_at, self._proposed_at = now + _REPEAT_SECONDS, now
            self._propose()
        self._proceed(now)

    # What others say.

    def receive(self, sender: int, message: dict[str, Any], now: float) -> None:
        """Takes a message of a worker."""
        self._now = now
        if self.is_excluded:
            return
        if "ready" in message:
            self._take_ready(sender, message)
        elif "suspect" in message:
            self._take_suspicion(sender, message)
        elif "prepare" in message:
            self._take_proposal(sender, _ballot(message), set(map(int, message["prepare"])))
        elif "promise" in message and _ballot(message) == self._promised and self._reports is not None:
            self._reports[sender] = Report.of_json(message["promise"])
        elif "refuse" in message:
            self._highest = max(self._highest, int(message["refuse"]))
            if self._reports is not None and _ballot(message) == self._promised:
                self._drop_proposal()
        elif "accept" in message and _ballot(message) != self._promised:
            self._send_to(sender, {"refuse": self._promised[0], "ballot": message["ballot"]})
        elif "accept" in message:
            self._accepted, self.obstacle = Decision(View.of_json(message["accept"]), int(message["step"])), None
            self._attempts.append(self._accepted.view)
            self._proposes_until = now + _REPLAY_SECONDS + self._answer_seconds
            self._answer_if_it_can(sender)
        elif "accepted" in message and self._decision is not None and _ballot(message) == self._promised:
            self._has_accepted.add(sender)
        elif "install" in message and _ballot(message) == self._promised and self._accepted is not None:
            self._install(self._accepted)
        elif "obstacle" in message and _ballot(message) == self._promised:
            self.obstacle = NoMajority(*(tuple(map(int, numbers)) for numbers in message["obstacle"]))
        elif "exclude" in message and self.view == NO_VIEW:
            self.refusals += 1
        elif "exclude" in message and _ballot(message) > self.view.ballot:
            self.is_excluded = True
        elif "joins" in message and sender in self._ended:
            self._send_to(sender, {"exclude": True, "ballot": self.view.ballot})
        elif "joins" in message:
            self._take_progress(sender, int(message["joins"]))
        self._proceed(now)

    def _take_progress(self, worker: int, step: int) -> None:
        self.joining[worker], lag = step, self.committed - step
        least, reports = self._lags.get(worker, (lag + 1, 0))
        self._lags[worker] = (lag, 0) if lag < least else (least, reports + 1)

    def joins_with(self, step: int) -> None:
        """This worker, which joins, has the state after a step."""
        self.committed = step
        if self._accepted is not None:
            self._answer_if_it_can(self._accepted.view.ballot[1])

    # Steps.

    def _take_ready(self, sender: int, message: dict[str, Any]) -> None:
        ballot, step = _ballot(message), int(message["ready"])
        if (ballot, step) > (self.view.ballot, self.committed + 1):
            self._early_ready.append((sender, message))
        elif (ballot, step) == (self.view.ballot, self.committed + 1):
            self._ready.add(sender)
            if message.get("leaves"):
                self._leave.add(sender)
            self._plans_change |= bool(message["plan"])
            self._commit_if_all_are_ready()

    def _commit_if_all_are_ready(self) -> None:
        may_commit = self._promised == self.view.ballot and self.is_ready
        if may_commit and self._ready.issuperset(self.view.members):
            leaving = frozenset(self._leave)
            self._commit()
            self.leaving = leaving
            if self._plans_change:
                self.is_changing = True
            self._take_early()

    def _take_early(self) -> None:
        early, self._early_ready = self._early_ready, []
        for sender, message in early:
            self._take_ready(sender, message)

    def _commit(self) -> None:
        self.committed += 1
        self.is_ready, self._ready = False, set()
        self.leaving, self._leave = frozenset(), set()

    # Changes.

    def _miss(self, worker: int) -> None:
        if worker in self.view.members and not self.is_excluded:
            self.is_changing = True
            self._send_to_all(self.view.members, self._suspicion())
        self._drop_decision_with(worker)

    def _drop_decision_with(self, worker: int) -> None:
        """Proposes again if a worker is lost that has been chosen."""
        if self._decision is not None and worker in self._decision.view.members:
            self._drop_proposal()
            self._repeat_at = 0.0

    def _suspicion(self) -> dict[str, Any]:
        return {"suspect": sorted(self._ended), "ballot": self.view.ballot, "promised": self._promised}

    def _take_suspicion(self, sender: int, message: dict[str, Any]) -> None:
        if _ballot(message) == self.view.ballot and sender in self.view.members:
            self.is_changing = True
            for worker in set(map(int, message["suspect"])) - self._ended:
                self._ended.add(worker)
                self._drop_decision_with(worker)
        elif _ballot(message) < self.view.ballot and sender not in self.view.members:
            self._send_to(sender, {"exclude": True, "ballot": self.view.ballot})
        elif _ballot(message) < self.view.ballot and _as_ballot(message["promised"]) > self.view.ballot:
            self.is_changing = True  # it has promised another proposal since it accepted this view: it cannot begin it

    def _find_leader(self) -> int | None:
        """Returns the oldest worker of this one's view that it reaches."""
        heard = [worker for worker in self.view.members if worker not in self._ended | self._silent]
        return min([*heard, self.own]) if self.view != NO_VIEW else None

    def _is_oldest(self) -> bool:
        return self._find_leader() == self.own

    def _can_take_in(self) -> set[int]:
        """Returns the workers that join and are up to date, unless an earlier process of their rank may live."""
        lost = self._ended | self._silent
        taken = {member % self._ranks for member in self.view.members if member not in lost}
        heard = [worker for worker in self.joining if worker not in lost and worker % self._ranks not in taken]
        newest = {worker % self._ranks: worker for worker in sorted(heard)}
        return {worker for worker in newest.values() if self._is_close(worker)} - self._refused()

    def _is_close(self, worker: int) -> bool:
        lag, (_, reports) = self.committed - self.joining[worker], self._lags.get(worker, (0, 0))
        return lag <= 1 or (reports >= _PATIENT_REPORTS and lag <= _LONGEST_LAG)

    def _refused(self) -> set[int]:
        return {worker for worker, until in self._refused_until.items() if self._now < until}

    def _propose(self) -> None:
        self._highest = max(self._highest, self._promised[0]) + 1
        self._promised = (self._highest, self.own)
        self._accepted = None
        asked = {member for attempt in self._attempts for member in attempt.members} - self._refused()
        asked |= set(self.view.members)
        self._asked_to_join = self._can_take_in()
        asked |= self._asked_to_join
        self._asked = asked - {self.own} - self._ended - self._silent
        self._reports = {self.own: self._report(self._asked)}
        self._send_to_all(self._asked, {"prepare": sorted(self._asked), "ballot": self._promised})

    def _take_proposal(self, sender: int, ballot: Ballot, asked: set[int]) -> None:
        known = {member for attempt in self._attempts for member in attempt.members} | set(self.view.members)
        if self.view != NO_VIEW and sender not in known:
            return self._send_to(sender, {"exclude": True, "ballot": self.view.ballot})
        self._highest = max(self._highest, ballot[0])
        if ballot <= self._promised:
            return self._send_to(sender, {"refuse": self._promised[0], "ballot": ballot})
        self._drop_proposal()
        self._promised, self._accepted, self.is_changing = ballot, None, True
        self._proposes_until = self._now + 2 * self._answer_seconds
        self._send_to(sender, {"promise": self._report(asked).as_json(), "ballot": ballot})
        return None

    def _report(self, asked: set[int]) -> Report:
        ended, silent = frozenset(self._ended), frozenset(self._silent | (asked - self._connected - {self.own}))
        return Report(self.view, tuple(self._attempts), self.committed, self.is_ready, ended, silent)

    def _give_up_waiting(self, now: float) -> None:
        """Continues without workers that are reached, and do not answer: they may not reach this one."""
        decision, reports = self._decision, self._reports or {}
        if decision is None:
            self._proposed_at = now
            self._asked &= reports.keys()
            return
        missing = set(decision.view.members) - self._has_accepted
        replays = all(reports[worker].view == NO_VIEW for worker in missing)
        if replays and now <= self._proposed_at + _REPLAY_SECONDS:
            return
        for worker in missing:
            self.joining.pop(worker, None)
            self._refused_until[worker] = now + _REFUSED_SECONDS
            self._silent.add(worker)
        self._drop_proposal()

    def _proceed(self, now: float) -> None:
        """Continues a proposal of this worker as far as possible."""
        reports, decision = self._reports, self._decision
        if reports is None:
            return
        if decision is None:
            for report in reports.values():
                self._ended |= report.proved_ends
            lost = self._ended | self._silent
            if not reports.keys() >= self._asked - lost:
                return
            # Who has answered may have been lost since. What this worker knows is newer than its report, too.
            reports = {worker: report for worker, report in reports.items() if worker not in lost}
            reports[self.own] = self._report(self._asked)
            outcome = decide(self._promised, reports)
            if isinstance(outcome, NoMajority):
                self.obstacle = outcome
                obstacle = [outcome.members, outcome.present, outcome.ended]
                self._send_to_all(reports, {"obstacle": obstacle, "ballot": self._promised})
                return self._drop_proposal()
            if self.own not in outcome.view.members:
                return self._drop_proposal()
            self.obstacle = None
            for worker in self._asked_to_join.difference(outcome.view.members):
                self._refused_until[worker] = now + _REFUSED_SECONDS
            decision = self._decision = self._accepted = outcome
            self._attempts.append(decision.view)
            self._proposed_at = now
            self._has_accepted = {self.own}
            message = {"accept": _as_json(decision.view), "step": decision.step, "ballot": self._promised}
            self._send_to_all(decision.view.members, message)
        if self._has_accepted.issuperset(decision.view.members):
            ballot = self._promised
            others = (self._asked | set(self.view.members)) - set(decision.view.members)
            # In this order: who sees that this worker ends, and has not received this, knows that nobody has begun.
            self._send_to_all(others, {"exclude": True, "ballot": ballot})
            self._send_to_all(decision.view.members, {"install": True, "ballot": ballot})
            self._install(decision)
        return None

    def _answer_if_it_can(self, proposer: int) -> None:
        decision = self._accepted
        if decision is not None and self.committed + self.is_ready >= decision.step:
            self._send_to(proposer, {"accepted": True, "ballot": decision.view.ballot})

    def _install(self, decision: Decision) -> None:
        self._drop_proposal()
        self._repeat_at, self._leader, self._idle = 0.0, None, {}
        if self.committed < decision.step:
            self._commit()
        # The proposer has sent this, too; some of those that are left out may not reach it.
        left_out = set(self.view.members).difference(decision.view.members, self._ended)
        self._send_to_all(left_out, {"exclude": True, "ballot": decision.view.ballot})
        self.is_ready = self.is_changing = self._plans_change = False
        self._ready, self._leave = set(), set()
        self.view, self._attempts, self._accepted, self.obstacle = decision.view, [], None, None
        self.joining = {worker: step for worker, step in self.joining.items() if worker not in self.view.members}
        if self.view.members and (self._ended | self._silent) & set(self.view.members):
            self.is_changing = True  # a member was lost while the view was decided
        self._take_early()

    def _drop_proposal(self) -> None:
        self._reports = self._decision = None
        self._has_accepted = set()

    def _send_to_all(self, workers: Iterable[int], message: dict[str, Any]) -> None:
        for worker in sorted(workers):
            if worker != self.own:
                self._send_to(worker, message)


def _ballot(message: dict[str, Any]) -> Ballot:
    return _as_ballot(message["ballot"])


def _as_ballot(value: Any) -> Ballot:
    number, proposer = value
    return int(number), int(proposer)


def _as_json(view: View) -> dict[str, Any]:
    return {"ballot": list(view.ballot), "members": list(view.members)}
