"""What the hosts have told of one attempt, and what ends it."""

import dataclasses
import time
from typing import Any

from tfdist.launch.limits import Graces
from tfdist.launch.nodes.outcomes import merge
from tfdist.launch.nodes.roster import Member
from tfdist.launch.others import Order
from tfdist.launch.outcome import Outcome


class Tally:
    """One attempt, as the coordinator hears of it. The first cause is the one that arrives first.

    Args:
        number: Which attempt it is, 0 first.
        members: Those that have a part in it.
        now: Time in seconds.
    """

    def __init__(self, number: int, members: list[Member], *, now: float) -> None:
        self.number = number
        self.order: Order | None = None
        self.ended_at: float | None = None  # when the order was given
        self.is_stopped = False  # whether a supervisor was told to end, before a failure or after it
        self._members = list(members)
        self._workers = sum(member.share for member in members)
        self._complaints: list[int] = []  # nodes, in the order of their first failures
        self._echo = ""  # a failure that only tells of a lost peer
        self._echo_from = now  # when it is taken for the cause, if nothing else is found
        self._patient_until: float | None = None
        self._lost = ""
        self._began, self._started_at = now, time.time()

    @property
    def is_over(self) -> bool:
        """Whether nobody runs any more."""
        return not any(member.is_running for member in self._members)

    def complain(self, member: Member, text: str, *, now: float) -> None:
        """Takes a failure that is a cause of its own."""
        if member.rank not in self._complaints:
            self._complaints.append(member.rank)
        self._end(Order(text), now)

    def echo(self, text: str, *, now: float) -> None:
        """Takes a failure that only tells of a lost peer, and for which its host has had patience."""
        self._echo, self._echo_from = self._echo or text, now

    def lose(self, member: Member, text: str, *, now: float) -> None:
        """Takes the loss of a host."""
        self._members.remove(member)
        self._lost = self._lost or ("" if self.order else text)
        self._end(Order(text), now)

    def stop(self, number: int, text: str, *, again: bool, now: float) -> None:
        """Takes a signal to a supervisor."""
        self.is_stopped = True
        if self.order is None:
            self._end(Order(text, stop_signal=number), now)
        elif again and not self.order.kill:
            self.order = dataclasses.replace(self.order, kill=True)

    def finish(self, member: Member, outcome: Outcome, *, graces: Graces, now: float) -> None:
        """Takes the outcome of a host.

        Args:
            member: The host.
            outcome: Of its workers.
            graces: How long the others may go on where workers have saved and left, or only told of a lost peer.
            now: Time in seconds.
        """
        member.outcome = outcome
        if self.order is not None or not outcome.has_failed:
            return
        first = outcome.cause
        if first is not None and first.is_preempted:
            self._patient_until = self._patient_until or now + graces.stop
        elif first is not None and first.is_echo:
            self._echo = self._echo or outcome.describe()
            self._echo_from = max(self._echo_from, now + graces.patience)
        else:
            self.complain(member, outcome.describe(), now=now)

    def look(self, *, suspects: bool, now: float) -> None:
        """Lets time pass.

        Args:
            suspects: Whether a host, or a worker of a host, is silent for so long that it may be about to be lost:
                then an echo is not taken for the cause yet.
            now: Time in seconds.
        """
        if self._echo and now >= self._echo_from and not suspects:
            self._end(Order(self._echo), now)
        if self._patient_until is not None and now >= self._patient_until:
            self._end(Order("workers of other hosts have saved and left"), now)

    def outcome(self, *, now: float) -> Outcome:
        """Returns the outcome of all hosts."""
        places = {rank: place for place, rank in enumerate(self._complaints)}
        told = sorted(self._members, key=lambda member: places.get(member.rank, len(places)))
        more: dict[str, Any] = {"lost": self._lost}
        if self.order is not None:
            more["stop_signal"] = self.order.stop_signal
        return merge(
            [member.outcome for member in told if member.outcome is not None],
            attempt=self.number,
            workers=self._workers,
            started_at=self._started_at,
            seconds=(now if self.ended_at is None else self.ended_at) - self._began,
            **more,
        )

    def _end(self, order: Order, now: float) -> None:
        if self.order is None:
            self.order, self.ended_at = order, now
