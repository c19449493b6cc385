"""Decides for all hosts of a run: when an attempt starts, what ends it, and what follows."""

import enum
from collections.abc import Mapping
from typing import Any

from tfdist.cluster.exit_codes import LOST_RUN_EXIT_CODE
from tfdist.launch.failure import signal_name
from tfdist.launch.nodes.link import LinkClosed
from tfdist.launch.nodes.outcomes import decode
from tfdist.launch.nodes.roster import SUSPICIOUS_BEATS, Member, Refused, Roster, Sender
from tfdist.launch.nodes.rules import Rules
from tfdist.launch.nodes.tally import Tally
from tfdist.launch.others import Order
from tfdist.launch.restarts import Restarts
from tfdist.launch.settlement import Settlements

_READY_SECONDS = 30.0


class _Phase(enum.Enum):
    GATHERING = "waiting for hosts, or for the delay before a restart"
    PREPARING = "hosts are choosing ports"
    RUNNING = "an attempt runs"
    OVER = "the end has been told"


class Coordinator:
    """The rules of a run over several hosts, without sockets or clocks: links and times are handed in.

    Every method takes `now`, a time in seconds that goes only while this process looks at its links.

    Args:
        rules: What holds for all hosts.
    """

    def __init__(self, rules: Rules, *, now: float) -> None:
        self._rules = rules
        self._roster = Roster(rules)
        self._phase = _Phase.GATHERING
        self._number = self._round = 0
        self._not_before, self._deadline = now, now + rules.start_timeout
        self._beat_at = now
        self._settlements: Settlements | None = None  # made when all have joined
        self._left_out: dict[int, int] = {}  # workers that a node has too many, in the next attempt
        self._tally: Tally | None = None
        self._sent: Order | None = None
        self._ready_by = now
        self._waits_for: list[int] = []  # what the user was told
        self._broken: list[tuple[Member, str]] = []  # links that took no message
        self._last_code = 1

    @property
    def is_over(self) -> bool:
        """Whether the end has been told."""
        return self._phase is _Phase.OVER

    def join(self, link: Sender, said: Mapping[str, Any], *, now: float) -> Member | None:
        """Takes a host in, or refuses it and returns None.

        Raises:
            ValueError: If it says nothing of the kind. So are KeyError and TypeError.
            LinkClosed: If it is gone again.
        """
        if self.is_over:
            link.send({"type": "refused", "reason": "Received: a run that has ended. Expected: one that runs."})
            return None
        try:
            member, before = self._roster.admit(link, said, now=now)
        except Refused as refusal:
            link.send({"type": "refused", "reason": str(refusal)})
            return None
        if before is not None:
            self._take_loss(before, "it has come back", now)
        beats = {"beat_seconds": self._rules.beat_seconds, "silence_limit": self._rules.silence_limit}
        link.send({"type": "joined", "run": self._rules.run_id, **beats})
        if self._phase is _Phase.RUNNING:
            text = f"attempt {self._number} runs already; {member.name} takes part from the next restart on"
            self._send(member, {"type": "news", "text": text})
        return member

    def hear(self, member: Member, said: Mapping[str, Any], *, now: float) -> None:
        """Takes a message of a host.

        Raises:
            ValueError: If it is none. So are KeyError and TypeError.
        """
        member.heard_at = now
        kind, tally = said["type"], self._tally
        if kind == "beat":
            member.suspects = bool(said["suspects"])
        elif kind == "stop":
            self._stop(member, int(said["signal"]), bool(said["again"]), now)
        elif kind == "ready" and self._phase is _Phase.PREPARING and said["round"] == self._round:
            ports = tuple(int(port) for port in said["ports"])
            if len(ports) != member.share or not all(0 < port < 65_536 for port in ports):
                raise ValueError("ports of another attempt")
            member.ports = ports
        elif kind in ("failed", "echo", "done") and tally is not None and said["attempt"] == self._number:
            if not member.is_running:
                return
            if kind == "failed":
                tally.complain(member, str(said["text"]), now=now)
            elif kind == "echo":
                tally.echo(str(said["text"]), now=now)
            else:
                graces = self._rules.limits.graces(may_restart=False)
                tally.finish(member, decode(said["outcome"], member.host), graces=graces, now=now)

    def lose(self, member: Member, reason: str, *, now: float) -> None:
        """Takes the loss of a host: its connection has ended, or it has said nonsense."""
        if self._roster.find(member.rank) is member:
            self._roster.remove(member)
            self._take_loss(member, reason, now)

    def look(self, *, now: float) -> None:
        """Does what is due."""
        limit = self._rules.silence_limit
        while self._broken:
            member, reason = self._broken.pop()
            self.lose(member, reason, now=now)
        for member in self._roster.members:
            if limit and now - member.heard_at >= limit:
                self.lose(member, f"no sign of life for {limit:g} s", now=now)
        if self._phase is _Phase.GATHERING:
            self._gather(now)
        if self._phase is _Phase.PREPARING:
            self._start_when_ready(now)
        if self._phase is _Phase.RUNNING and self._tally is not None:
            self._run(self._tally, now)
        if now >= self._beat_at:
            self._beat_at = now + self._rules.beat_seconds
            self._tell_all({"type": "beat"})

    def end(self, reason: str) -> None:
        """Tells all that the run is over, because it cannot go on."""
        self._finish(LOST_RUN_EXIT_CODE, [reason])

    def _gather(self, now: float) -> None:
        if now < self._not_before:
            return
        missing, least = self._roster.missing, self._rules.min_workers
        is_first = self._settlements is None
        if missing and (is_first or least is None or self._roster.workers < least):
            names = ", ".join(f"node {rank}" for rank in missing)
            if now >= self._deadline:
                self._finish(self._last_code, [f"not started: {names} did not join in {self._rules.start_timeout:g} s"])
            elif missing != self._waits_for:
                self._waits_for = missing
                self._tell_all({"type": "news", "text": f"waiting for {names}"})
            return
        everyone = self._roster.all_workers
        if is_first and least is not None and least > everyone:
            wrong = f"Received: --min-workers {least}. Expected: at most {everyone}, the workers of all hosts."
            self._finish(2, [f"error: There are fewer workers than the least number. {wrong} Correct one of them."])
            return
        self._waits_for = []
        if sum(map(self._share_of, self._roster.members)) < (least or 1):
            self._left_out = {}  # other hosts were here when it was decided
        self._round += 1
        first_rank = 0
        for member in self._roster.members:
            member.share = self._share_of(member)
            member.first_rank, member.ports, member.outcome, member.suspects = first_rank, None, None, False
            first_rank += member.share
            if member.share:
                self._send(member, {"type": "prepare", "round": self._round, "workers": member.share})
        if first_rank:
            self._phase, self._ready_by = _Phase.PREPARING, now + _READY_SECONDS

    def _share_of(self, member: Member) -> int:
        return max(0, member.workers - self._left_out.get(member.rank, 0))

    def _start_when_ready(self, now: float) -> None:
        members = [member for member in self._roster.members if member.share]
        if any(member.ports is None for member in members):
            for member in members if now >= self._ready_by else ():
                if member.ports is None:
                    self.lose(member, "it did not get ready", now=now)
            return
        workers = sum(member.share for member in members)
        if self._settlements is None:
            restarts = Restarts(
                workers=self._roster.all_workers,
                min_workers=self._rules.min_workers or self._roster.all_workers,
                max_restarts=self._rules.max_restarts,
                delay_seconds=self._rules.restart_delay,
            )
            self._settlements = Settlements(restarts, self._rules.run_id)
        self._tally, self._sent = Tally(self._number, members, now=now), None
        self._phase = _Phase.RUNNING
        plan = {"workers": self._roster.addresses(), "all_workers": self._roster.all_workers}
        plan |= {"may_restart": self._settlements.may_restart}
        for member in members:
            first = {"first_rank": member.first_rank}
            self._send(member, {"type": "start", "attempt": self._number, **plan, **first})
        hosts = ", ".join(f"{member.name}: {member.share}" for member in members)
        self._tell_all({"type": "news", "text": f"attempt {self._number}: {workers} workers ({hosts})"})

    def _run(self, tally: Tally, now: float) -> None:
        running = [member for member in self._roster.members if member.is_running]
        silence = SUSPICIOUS_BEATS * self._rules.beat_seconds
        tally.look(suspects=any(member.suspects or now - member.heard_at >= silence for member in running), now=now)
        if tally.order is not None and tally.order != self._sent:
            self._sent = order = tally.order
            said = {"reason": order.reason, "signal": order.stop_signal, "kill": order.kill}
            for member in running:
                self._send(member, {"type": "end", "attempt": self._number, **said})
        if tally.is_over and self._phase is _Phase.RUNNING:
            self._settle(tally, now)

    def _settle(self, tally: Tally, now: float) -> None:
        if self._settlements is None:
            return
        members = [member for member in self._roster.members if member.share]
        outcome = tally.outcome(now=now)
        enough = self._rules.min_workers is not None and self._roster.workers >= self._rules.min_workers
        available = self._roster.workers if enough else self._roster.all_workers
        settlement = self._settlements.after(outcome, is_stopped=tally.is_stopped, available=available)
        if settlement.code is not None:
            self._finish(settlement.code, settlement.lines, entry=settlement.entry)
            return
        self._last_code = outcome.exit_code or 1
        self._tell_all({"type": "settled", "lines": settlement.lines, "entry": settlement.entry})
        self._left_out = self._cut(members, outcome.failed_rank, available - settlement.workers)
        for member in self._roster.members:
            member.share = 0
        ended_at = now if tally.ended_at is None else tally.ended_at
        self._not_before, self._deadline = ended_at + settlement.delay_seconds, now + self._rules.start_timeout
        self._number += 1
        self._tally, self._phase = None, _Phase.GATHERING

    def _take_loss(self, member: Member, reason: str, now: float) -> None:
        member.link.close()
        if self.is_over:
            return
        text = f"{member.name} was lost: {reason}"
        if member.rank == 0:
            self.end(f"{text}; the run ends, as the rendezvous is there")
            return
        if self._phase is _Phase.PREPARING:
            self._phase, self._deadline = _Phase.GATHERING, now + self._rules.start_timeout
        if self._phase is _Phase.RUNNING and self._tally is not None and member.is_running:
            self._tally.lose(member, text, now=now)
        self._tell_all({"type": "news", "text": text})

    def _stop(self, member: Member, number: int, again: bool, now: float) -> None:
        text = f"{signal_name(number)} on {member.name}"
        if self._phase is _Phase.RUNNING and self._tally is not None:
            self._tally.stop(number, text, again=again, now=now)
        elif not self.is_over:
            self._finish(128 + number, [f"{text}: the run ends"])

    def _cut(self, members: list[Member], failed_rank: int | None, number: int) -> dict[int, int]:
        """Says which hosts leave how many workers out: first the one whose worker has failed, then the last ones."""
        at_fault = [
            member for member in members if failed_rank in range(member.first_rank, member.first_rank + member.share)
        ]
        cut: dict[int, int] = {}
        for member in [*at_fault, *reversed(self._roster.members)]:
            taken = min(number, member.workers - cut.get(member.rank, 0))
            if taken > 0:
                cut[member.rank] = cut.get(member.rank, 0) + taken
                number -= taken
        return cut

    def _finish(self, code: int, lines: list[str], *, entry: dict[str, Any] | None = None) -> None:
        self._phase = _Phase.OVER
        self._tell_all({"type": "over", "code": code, "lines": lines, "entry": entry})

    def _tell_all(self, message: Mapping[str, Any]) -> None:
        for member in self._roster.members:
            self._send(member, message)

    def _send(self, member: Member, message: Mapping[str, Any]) -> None:
        try:
            member.link.send(message)
        except LinkClosed as closed:
            self._broken.append((member, str(closed)))
