"""A checkpoint of which this host has files, and fetches others from the hosts that have them when they are read."""

from collections.abc import Mapping
from pathlib import Path

from tfdist.checkpoint.checkpoint import Checkpoint
from tfdist.checkpoint.errors import HostError
from tfdist.checkpoint.shard import ShardReader, read_shard
from tfdist.host_storage.inventory import Found
from tfdist.host_storage.meeting_of_hosts import Meeting


class HostCheckpoint(Checkpoint):
    """A committed checkpoint; what is read is kept in the directory of this host."""

    def __init__(
        self,
        path: Path,
        found: Found,
        meeting: Meeting | None,
        verified: Mapping[str, tuple[int, ...]],
        read: ShardReader = read_shard,
    ) -> None:
        """Describes a checkpoint. Files are verified when they are read.

        Args:
            path: Its directory on this host.
            found: What it has, and who has it.
            meeting: The other hosts, if there are any.
            verified: The fingerprints of files that this process has verified before.
            read: Reads a shard, as `read_shard`.
        """
        super().__init__(path, written=found.manifest, read=read)
        self._found, self._meeting = found, meeting
        self._verified |= verified

    def _check(self, name: str, *, verify_checksums: bool) -> None:
        if self._meeting is not None and not (self.path / name).exists():
            fetch(self._found, name, self.path, self._meeting)
        super()._check(name, verify_checksums=verify_checksums)


def fetch(found: Found, name: str, folder: Path, meeting: Meeting) -> int:
    """Copies a file of a checkpoint to a folder of this host; returns the host that had it.

    Raises:
        HostError: If no host that has it gives it.
        OSError: If it cannot be written.
    """
    problems = []
    for host in found.holders[name]:
        if host == meeting.host:
            continue
        address = meeting.addresses[meeting.hosts.leaders[host]]
        try:
            meeting.files.fetch(address, found.saved, name, found.manifest.files[name], folder / name)
        except HostError as error:
            problems.append(f"{error}, on {meeting.hosts.describe(host)}")
        else:
            return host
    raise HostError(
        f"A file of checkpoint {found.manifest.sequence} cannot be had. Received: {'; '.join(problems) or 'no host'} "
        f"for {name}. Expected: one of the hosts that have it. Start the program again; nothing was removed."
    )
