"""The hosts that have joined a run."""

import dataclasses
import ipaddress
from collections.abc import Mapping
from typing import Any, Protocol

from tfdist.launch.nodes.rules import Rules
from tfdist.launch.outcome import Outcome

SUSPICIOUS_BEATS = 2.5
"""Signs of life that a supervisor must have missed to be suspected."""


class Sender(Protocol):
    """What the coordinator needs of a link."""

    @property
    def local_address(self) -> str: ...

    def send(self, message: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class Refused(Exception):
    """A host may not join; the text says why."""


@dataclasses.dataclass
class Member:
    """A host that has joined, and its part in the present attempt."""

    rank: int
    host: str  # its name
    address: str  # where other hosts reach its workers
    workers: int  # how many it was asked for
    link: Sender
    heard_at: float
    suspects: bool = False  # a worker of its own, of being frozen
    share: int = 0  # its workers in the attempt; 0: it has no part in it
    first_rank: int = 0  # of these
    ports: tuple[int, ...] | None = None  # of these
    outcome: Outcome | None = None

    @property
    def name(self) -> str:
        """What users are told.

        >>> Member(1, "b", "10.0.0.2", 2, None, 0.0).name
        'node 1 (b)'
        """
        return f"node {self.rank} ({self.host})"

    @property
    def is_running(self) -> bool:
        """Whether it has a part in the attempt and has not told how that ended."""
        return self.share > 0 and self.outcome is None


class Roster:
    """Who has joined.

    Args:
        rules: What holds for all hosts.
    """

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._members: dict[int, Member] = {}
        self._sizes: dict[int, int] = {}  # of all that were ever here

    @property
    def members(self) -> list[Member]:
        """Those that are here, by rank."""
        return [self._members[rank] for rank in sorted(self._members)]

    @property
    def missing(self) -> list[int]:
        """The ranks of those that are not."""
        return [rank for rank in range(self._rules.nodes) if rank not in self._members]

    @property
    def workers(self) -> int:
        """How many workers those that are here were asked for."""
        return sum(member.workers for member in self._members.values())

    @property
    def all_workers(self) -> int:
        """How many workers all hosts were asked for, as far as they were ever here."""
        return sum(self._sizes.values())

    def find(self, rank: int) -> Member | None:
        """Returns the member of that rank, if it is here."""
        return self._members.get(rank)

    def admit(self, link: Sender, said: Mapping[str, Any], *, now: float) -> tuple[Member, Member | None]:
        """Takes a host in.

        Args:
            link: To the host, which has proved the token.
            said: What it says of itself.
            now: Time in seconds.

        Returns:
            The new member, and the one that it replaces, if any: one that has fallen silent.

        Raises:
            Refused: If it does not fit.
            ValueError: If it says nothing of the kind. So are KeyError and TypeError.
        """
        rank, workers = int(said["node"]), int(said["workers"])
        same: dict[str, int | None] = {"--nodes": self._rules.nodes, "--max-restarts": self._rules.max_restarts}
        same["--min-workers"] = self._rules.min_workers
        differing = [option for option, value in same.items() if said["options"][option] != value]
        if differing:
            theirs = " ".join(f"{option} {_shown(said['options'][option])}" for option in differing)
            ours = " ".join(f"{option} {_shown(same[option])}" for option in differing)
            raise Refused(f"Received: {theirs}. Expected: {ours}, as on node 0. Give the same on every host.")
        if not 0 <= rank < self._rules.nodes or workers < 1:
            raise Refused(
                f"Received: --node-rank {rank} --workers {workers}. Expected: a rank from 0 to "
                f"{self._rules.nodes - 1} and at least one worker. Give every host its own rank."
            )
        before = self._members.get(rank)
        if before is not None and now - before.heard_at < SUSPICIOUS_BEATS * self._rules.beat_seconds:
            raise Refused(
                f"Received: --node-rank {rank}, which {before.host} has. Expected: a rank that is free. Give every "
                "host its own rank, or end the other tfdist run first."
            )
        member = Member(rank, str(said["host"])[:255], str(said["address"]), workers, link, now)
        self._members[rank] = member
        self._sizes[rank] = workers
        return member, before

    def remove(self, member: Member) -> None:
        """Forgets a host that is gone."""
        if self._members.get(member.rank) is member:
            del self._members[member.rank]

    def addresses(self) -> list[str]:
        """Returns `host:port` of all workers of the attempt, by rank.

        Node 0 may know itself as loopback only, by the entry of its own name in /etc/hosts: others then reach it where
        they have reached the coordinator.
        """
        others = [member.link.local_address for member in self.members if member.rank]
        reached = next((address for address in others if not is_loopback(address)), "")
        found = []
        for member in self.members:
            if member.share:
                address = reached if not member.rank and reached and is_loopback(member.address) else member.address
                found += [f"{bracketed(address)}:{port}" for port in member.ports or ()]
        return found


def is_loopback(address: str) -> bool:
    """Whether it is a loopback address.

    >>> is_loopback("127.0.1.1"), is_loopback("10.0.0.1"), is_loopback("node7")
    (True, False, False)
    """
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def bracketed(address: str) -> str:
    """Returns it as it stands before a port.

    >>> bracketed("fd00::1"), bracketed("10.0.0.1")
    ('[fd00::1]', '10.0.0.1')
    """
    return f"[{address}]" if ":" in address else address


def _shown(value: object) -> str:
    return "(none)" if value is None else str(value)
