"""The hosts of one `fit`, once they have met: who they are, and how to reach them."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tfdist.checkpoint.direct_file import FileWriter
from tfdist.host_storage.hosts import Hosts, Messages, find_hosts, gather, received
from tfdist.host_storage.peer_files import PeerFiles


@dataclass(frozen=True)
class Place:
    """Where a worker is.

    Attributes:
        name: The name of its host, for messages.
        address: The name or address by which others reach the host.
        port: The port to answer on, unless it is 0, or in use.
    """

    name: str
    address: str
    port: int


@dataclass(frozen=True)
class Meeting:
    """Workers of several hosts that train together.

    Attributes:
        messages: By which they agree.
        hosts: Who they are.
        files: Gives and takes files.
        addresses: Of the `files` of all workers, by rank.
        timeout_seconds: How long a worker waits for others.
    """

    messages: Messages
    hosts: Hosts
    files: PeerFiles
    addresses: tuple[str, ...]
    timeout_seconds: float

    @property
    def rank(self) -> int:
        """The rank of this worker."""
        return self.messages.rank

    @property
    def host(self) -> int:
        """The number of this worker's host."""
        return self.hosts.host_of(self.rank)

    @property
    def leads(self) -> bool:
        """Whether this worker writes for all of its host."""
        return self.hosts.leader_of(self.rank) == self.rank

    @classmethod
    def of(
        cls,
        directory: Path,
        messages: Messages,
        place: Place,
        timeout_seconds: float,
        write: FileWriter,
        environ: Mapping[str, str],
    ) -> "Meeting | None":
        """Meets the other workers, all of which call this; returns None if all share one disk.

        Raises:
            CheckpointError: If the directory cannot be written, or a worker does not call this.
            OSError: If this worker cannot listen.
        """
        if messages.num_workers == 1:
            return None
        hosts = find_hosts(directory, messages, place.name, timeout_seconds)
        if len(hosts.members) == 1:
            return None
        others = range(1, messages.num_workers)
        if messages.rank == 0:
            cluster = secrets.token_hex(16)
            for rank in others:
                messages.send(rank, "meeting", cluster)
        else:
            cluster = received(messages, 0, "meeting", timeout_seconds)
        files = PeerFiles(directory, place.address, place.port, cluster, write, environ)
        try:
            addresses = gather(messages, "addresses", files.address, timeout_seconds)
        except BaseException:
            files.close()
            raise
        return cls(messages, hosts, files, tuple(addresses), timeout_seconds)
