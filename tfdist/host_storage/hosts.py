"""Which workers share a disk, who writes what, and who keeps copies; and the messages by which they agree."""

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from tfdist.checkpoint.errors import HostError, explained
from tfdist.checkpoint.manifest import SHARED_FILE, rank_file
from tfdist.utils import atomic_files

_PROBE_PREFIX = ".host-"
_SMALL_BYTES, _MOST_COPIES = 2**20, 7


class Messages(Protocol):
    """Messages between the workers of a training, each under another name.

    Attributes:
        rank: The rank of this worker.
        num_workers: The number of workers.
    """

    rank: int
    num_workers: int

    def send(self, to: int, name: str, value: Any) -> None:
        """Sends any JSON but null to the worker of a rank."""
        ...

    def receive(self, sender: int, name: str, timeout_seconds: float) -> Any:
        """Returns what a worker has sent under a name; None if it has sent nothing in time."""
        ...


class NamedMessages:
    """Messages that are not those of another purpose."""

    def __init__(self, messages: Messages, purpose: str) -> None:
        self.rank, self.num_workers = messages.rank, messages.num_workers
        self._messages, self._purpose = messages, purpose

    def send(self, to: int, name: str, value: Any) -> None:
        self._messages.send(to, f"{self._purpose}/{name}", value)

    def receive(self, sender: int, name: str, timeout_seconds: float) -> Any:
        return self._messages.receive(sender, f"{self._purpose}/{name}", timeout_seconds)


def received(messages: Messages, sender: int, name: str, timeout_seconds: float) -> Any:
    """Returns what a worker has sent.

    Raises:
        HostError: If it has sent nothing in time.
    """
    value = messages.receive(sender, name, timeout_seconds)
    if value is None:
        raise HostError(
            f"Worker {sender} has not answered within {timeout_seconds:g} s. Received: no {name!r} from it. Expected: "
            "FailureRecovery with the same arguments on all workers. Pass it to `fit` on every worker; if their disks "
            "are slow, raise peer_timeout_seconds."
        )
    return value


def gather(messages: Messages, name: str, value: Any, timeout_seconds: float) -> list[Any]:
    """Returns the values of all workers, by rank. All call this. The chief collects them.

    Raises:
        HostError: If a worker has not called this in time.
    """
    if messages.rank:
        messages.send(0, name, value)
        return list(received(messages, 0, f"{name}, of all", 2 * timeout_seconds))
    others = range(1, messages.num_workers)
    values = [value, *(received(messages, rank, name, timeout_seconds) for rank in others)]
    for rank in others:
        messages.send(rank, f"{name}, of all", values)
    return values


@dataclass(frozen=True)
class Hosts:
    """The hosts of a training, in the order of their lowest ranks. Workers are of one host if they share its disk.

    >>> hosts = Hosts(("a", "b"), ((0, 2), (1, 3)))
    >>> hosts.host_of(3), hosts.leader_of(3), [hosts.keepers_of(rank, size_bytes=100) for rank in range(4)]
    (1, 1, [(1,), (0,), (3,), (2,)])
    >>> len(hosts.files_of(1, [100] * 4))
    5
    """

    names: tuple[str, ...]
    members: tuple[tuple[int, ...], ...]

    @cached_property
    def _hosts(self) -> dict[int, int]:
        return dict(sorted((rank, host) for host, ranks in enumerate(self.members) for rank in ranks))

    def host_of(self, rank: int) -> int:
        """Returns the number of the host of a worker."""
        return self._hosts[rank]

    def leader_of(self, rank: int) -> int:
        """Returns the worker that writes for all of a worker's host: the one of the lowest rank."""
        return self.members[self.host_of(rank)][0]

    @property
    def leaders(self) -> tuple[int, ...]:
        """The leaders of all hosts. The first of them is the chief."""
        return tuple(ranks[0] for ranks in self.members)

    def keepers_of(self, rank: int, size_bytes: int) -> tuple[int, ...]:
        """Returns the workers of other hosts that keep copies of a worker's part: several if it is small."""
        host, count = self.host_of(rank), len(self.members)
        copies = min(count - 1, _MOST_COPIES if size_bytes <= _SMALL_BYTES else 1)
        place = self.members[host].index(rank)
        following = [self.members[(host + step) % count] for step in range(1, copies + 1)]
        return tuple(members[place % len(members)] for members in following)

    def files_of(self, host: int, part_bytes: Sequence[int]) -> tuple[str, ...]:
        """Returns the files of a checkpoint that a host has; `part_bytes` are the sizes of the parts, by rank."""
        ranks = [
            rank
            for rank, size in zip(self._hosts, part_bytes, strict=False)
            if host in map(self.host_of, (rank, *self.keepers_of(rank, size)))
        ]
        return (SHARED_FILE, *map(rank_file, ranks))

    def describe(self, host: int) -> str:
        """Returns a host's name and its workers, for messages."""
        workers = ", ".join(map(str, self.members[host]))
        return f"host {self.names[host]!r} (worker{'s' if len(self.members[host]) > 1 else ''} {workers})"


def find_hosts(directory: Path, messages: Messages, name: str, timeout_seconds: float) -> Hosts:
    """Finds out which workers share the disk of `directory`: each writes a file, and sees those of others there.

    Args:
        directory: The directory on this worker's disk, which is created.
        messages: All workers call this.
        name: The name of this worker's host, for messages.
        timeout_seconds: How long others may take.

    Raises:
        CheckpointError: If the directory cannot be written, or a worker does not call this.
    """
    probe = f"{_PROBE_PREFIX}{messages.rank}-{secrets.token_hex(8)}"
    with explained("No checkpoint can be written", directory):
        atomic_files.make_directory(directory)
        (directory / probe).touch()
        try:
            probes = gather(messages, "probes", [probe, name], timeout_seconds)
            present = set(os.listdir(directory))
            seen = [rank for rank, (other, _) in enumerate(probes) if other in present]
            groups = gather(messages, "disks", seen, timeout_seconds)
        finally:
            (directory / probe).unlink(missing_ok=True)
    return _hosts_of(groups, [host for _, host in probes])


def _hosts_of(groups: Sequence[Sequence[int]], names: Sequence[str]) -> Hosts:
    """Joins the groups of workers that see each other; a file server may show a file late."""
    host_of = list(range(len(groups)))
    for rank, seen in enumerate(groups):
        joined = {host_of[other] for other in [rank, *seen]}
        host_of = [min(joined) if host in joined else host for host in host_of]
    members = [tuple(rank for rank in range(len(groups)) if host_of[rank] == first) for first in sorted(set(host_of))]
    return Hosts(tuple(names[ranks[0]] for ranks in members), tuple(members))
