"""`HostStore`: the checkpoints of a training on the own disk of each host."""

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace

from tfdist.checkpoint.checkpoint import Checkpoint, directory_name, fingerprint_of
from tfdist.checkpoint.checkpoint_store import CheckpointStore
from tfdist.checkpoint.directory_lock import LOCK_TIMEOUT_SECONDS
from tfdist.checkpoint.errors import CheckpointError, CorruptCheckpointError, HostError, explained
from tfdist.checkpoint.manifest import MANIFEST_FILE, FileRecord, HostFiles, rank_file
from tfdist.checkpoint.shard import Json, Shard
from tfdist.checkpoint.sharded_save import EARLIER_INTACT, SavingRanks, WorkerFiles, check_save
from tfdist.host_storage.host_checkpoint import HostCheckpoint, fetch
from tfdist.host_storage.host_save import HostSave, commit
from tfdist.host_storage.hosts import Messages, NamedMessages, gather, received
from tfdist.host_storage.inventory import Found, inventory_of, newest_of, numbers_in
from tfdist.host_storage.meeting_of_hosts import Meeting, Place
from tfdist.host_storage.peer_files import Saved, damaged_files
from tfdist.utils import atomic_files

_log = logging.getLogger("tfdist")


class HostStore(CheckpointStore):
    """A directory of the same path on each host, each on its own disk: `CheckpointStore` without a shared disk.

    The workers `meet` before they restore and save. Until then, and where all share one disk, this is a
    `CheckpointStore`.

    Args:
        directory: The path, not an address.
        keep: How many checkpoints each host keeps, as in `CheckpointStore`.
        peer_timeout_seconds: How long a worker waits for others.

    Raises:
        ValueError: If an argument is invalid.
    """

    def __init__(self, directory: str | os.PathLike[str], *, keep: int = 3, peer_timeout_seconds: float = 60.0) -> None:
        if "://" in os.fspath(directory):
            raise ValueError(
                f"All workers share an object store. Received: directory={os.fspath(directory)!r}, shared=False. "
                "Expected: a path on the disk of each host, or an address without shared=False."
            )
        super().__init__(directory, keep=keep, peer_timeout_seconds=peer_timeout_seconds)
        self._meeting: Meeting | None = None
        self._is_first = True
        self._inventories: dict[int, Json] = {}
        self._verified: dict[str, tuple[int, ...]] = {}  # of the files on this host that `newest` has verified
        self._chosen: Found | None = None
        self._is_completed = False  # whether this host has what it shall have of the chosen one

    @property
    def leads(self) -> bool:
        """Whether this worker writes for all of its host, also what all workers have in common."""
        return self._is_first if self._meeting is None else self._meeting.leads

    def meet(self, messages: Messages, place: Place, purpose: str) -> Callable[[], None]:
        """Meets the other workers of a `fit`, all of which call this, and locks the directory on each host.

        Args:
            messages: By which they agree.
            place: Where this worker is.
            purpose: Distinguishes the messages from those for other stores.

        Returns:
            A function that ends the meeting: this worker answers no more.

        Raises:
            CheckpointError: If a directory cannot be written or is locked, or a worker does not call this.
        """
        self._is_first, named = messages.rank == 0, NamedMessages(messages, purpose)
        meeting = Meeting.of(self.directory, named, place, self.peer_timeout_seconds, self._write, os.environ)
        self._meeting = meeting
        self._chosen, self._is_completed, self._inventories = None, False, {}
        if meeting is None:
            return lambda: None
        lock = self.lock()

        def end() -> None:
            meeting.files.close()
            lock.release()

        try:
            self._take_stock(meeting, lock.acquire)
        except BaseException:
            end()
            raise
        return end

    def _take_stock(self, meeting: Meeting, lock: Callable[[], None]) -> None:
        """Tells the chief what is on which host. The chief itself locks its directory later, and looks then."""
        if meeting.rank:
            if meeting.leads:
                try:
                    lock()
                    with explained("The checkpoints could not be read", self.directory):
                        stock = inventory_of(self.directory)
                except CheckpointError as error:
                    meeting.messages.send(0, "stock", {"failed": str(error)})
                    raise
                meeting.messages.send(0, "stock", stock)
            return
        for rank in meeting.hosts.leaders[1:]:
            host = meeting.hosts.host_of(rank)
            # That worker may wait for its lock first.
            stock = received(meeting.messages, rank, "stock", meeting.timeout_seconds + LOCK_TIMEOUT_SECONDS)
            if "failed" in stock:
                raise HostError(f"{stock['failed']} This is what {meeting.hosts.describe(host)} found.")
            self._inventories[host] = stock

    def newest(self) -> tuple[Checkpoint | None, list[str]]:
        """Finds the newest checkpoint that was committed and is intact on the hosts together, as the chief.

        Returns:
            The checkpoint, or None; and the reasons why newer ones were skipped: which files are missing, and where
            they were saved.

        Raises:
            CheckpointError: If something cannot be read, or a host does not answer.
        """
        meeting = self._meeting
        with explained("The checkpoints could not be read", self.directory):
            inventories = {0: inventory_of(self.directory), **self._inventories}
            describe = meeting.hosts.describe if meeting else lambda _: "this host"
            found, skipped = newest_of(inventories, describe, self._damaged)
        if found is None:
            return None, skipped
        self._chosen = found
        if meeting is not None:
            for rank in range(1, meeting.messages.num_workers):
                meeting.messages.send(rank, "chosen", found.to_json())
        return self._opened(found), skipped

    def open(self, sequence: int) -> Checkpoint:
        """Opens the checkpoint that the chief has chosen. Its files are fetched from other hosts if they are missing.

        Raises:
            CheckpointError: If it cannot be had.
        """
        meeting, chosen = self._meeting, self._chosen
        if meeting is None:
            if chosen is None or chosen.manifest.sequence != sequence:
                return super().open(sequence)
            return self._opened(chosen)
        if chosen is None:
            chosen = self._chosen = Found.from_json(received(meeting.messages, 0, "chosen", meeting.timeout_seconds))
        if chosen.manifest.sequence != sequence:
            raise CorruptCheckpointError(
                f"Checkpoint {sequence} is not the one that was chosen. Received: sequence={sequence}. Expected: "
                f"{chosen.manifest.sequence}."
            )
        return self._opened(chosen)

    def newest_number(self) -> int:
        """Returns the largest number on any host, as the chief, without reading files; -1 if there is none."""
        with explained("The checkpoints could not be read", self.directory):
            inventories = [inventory_of(self.directory), *self._inventories.values()]
        return max((number for one in inventories for number in numbers_in(one)), default=-1)

    def wait_until_all_have_read(self) -> None:
        """Waits until all workers have read what they restore: no host may end while another one needs its files.

        Raises:
            CheckpointError: If a worker does not call this.
        """
        if self._meeting is not None:
            gather(self._meeting.messages, "has read", True, self._meeting.timeout_seconds)

    def save(
        self,
        sequence: int,
        attempt: str,
        *,
        rank: int,
        num_ranks: int,
        rank_shard: Shard,
        shared_shard: Shard | None,
        metadata: Json,
        worker_files: WorkerFiles | None = None,
        saving: SavingRanks | None = None,
    ) -> Checkpoint | None:
        """Saves a checkpoint, see `CheckpointStore.save`. The leader of each host gives the shared shard.

        Returns:
            The checkpoint on the chief: all hosts have it. None on others.

        Raises:
            CheckpointError: If it is not saved; earlier checkpoints are intact.
            ValueError: If an argument is invalid.
        """
        meeting = self._meeting
        if meeting is None:
            return super().save(
                sequence,
                attempt,
                rank=rank,
                num_ranks=num_ranks,
                rank_shard=rank_shard,
                shared_shard=shared_shard,
                metadata=metadata,
                worker_files=worker_files,
                saving=saving,
            )
        check_save(sequence, attempt, rank, num_ranks)
        with explained(f"Checkpoint {sequence} could not be written", self.directory, EARLIER_INTACT):
            save = HostSave(self.directory, sequence, attempt, meeting, is_taken=meeting.leads and self._has(sequence))
            manifest = save.run(rank_shard, shared_shard, metadata)
        if manifest is None:
            return None
        self._known_complete.add(sequence)
        self._remove_old(sequence)
        if rank:
            return None
        holders = {
            name: [host for host, entry in enumerate(manifest.hosts) if name in entry.files] for name in manifest.files
        }
        return HostCheckpoint(self.directory / directory_name(sequence), Found(manifest, holders), meeting, {})

    def remove_unfinished(self, current_attempt: str | None = None) -> None:
        """Removes unfinished saves, but not the files of the checkpoint that was chosen, see `CheckpointStore`."""
        if self._meeting is None or self._chosen is None:
            super().remove_unfinished(current_attempt)

    def _has(self, sequence: int) -> bool:
        # An earlier `fit` may have saved it, and its directory was removed since.
        return sequence in self._known_complete and (self.directory / directory_name(sequence)).exists()

    def _damaged(self, host: int, saved: Saved, records: Mapping[str, FileRecord]) -> Mapping[str, str]:
        meeting = self._meeting
        if meeting is None or host == meeting.host:
            folder = saved.folder(self.directory)
            fingerprints = {name: fingerprint_of(folder / name) for name in records}
            damaged = damaged_files(folder, records)
            self._verified = {name: found for name, found in fingerprints.items() if name not in damaged}
            return damaged
        address = meeting.addresses[meeting.hosts.leaders[host]]
        try:
            return meeting.files.damaged(address, saved, records, meeting.timeout_seconds)
        except HostError as error:
            raise HostError(
                f"The files of checkpoint {saved.sequence} could not be verified. Received: {error}, on "
                f"{meeting.hosts.describe(host)}. Expected: an answer. Start the program again."
            ) from error

    def _opened(self, found: Found) -> Checkpoint:
        """Makes the leader of each host complete what its host has of the checkpoint, and opens it."""
        meeting, sequence = self._meeting, found.manifest.sequence
        path = self.directory / directory_name(sequence)
        if meeting is not None and not self._is_completed:
            members = meeting.hosts.members[meeting.host]
            if meeting.leads:
                outcome = "The worker that leads this host has ended."
                try:
                    with explained(f"Checkpoint {sequence} could not be restored", self.directory):
                        self._complete(found, meeting)
                    outcome = "yes"
                except CheckpointError as error:
                    outcome = str(error)
                    raise HostError(outcome) from error  # which is not tried again: the others of this host know it
                finally:
                    for rank in members[1:]:
                        meeting.messages.send(rank, "completed", outcome)
            elif (answer := received(meeting.messages, members[0], "completed", meeting.timeout_seconds)) != "yes":
                raise HostError(answer)
        self._is_completed = True
        self._known_complete.add(sequence)
        return HostCheckpoint(path, found, meeting, self._verified, self._read_shard)

    def _complete(self, found: Found, meeting: Meeting) -> None:
        """Fetches what this host shall have, and gives what it has the name and the manifest of the checkpoint."""
        saved, manifest, hosts = found.saved, found.manifest, meeting.hosts
        if not manifest.hosts:  # it was saved to a disk that all shared
            present = [
                HostFiles(name, tuple(file for file, holders in found.holders.items() if host in holders))
                for host, name in enumerate(hosts.names)
            ]
            manifest = replace(manifest, hosts=tuple(present))
        folder = saved.folder(self.directory)
        atomic_files.make_directory(folder)
        records = [manifest.files.get(rank_file(rank), FileRecord(0, "")) for rank in range(manifest.num_ranks)]
        files = hosts.files_of(meeting.host, [record.size_bytes for record in records])
        wanted = [name for name in files if name in manifest.files]
        here = {name for name, hosts in found.holders.items() if meeting.host in hosts}
        sources: dict[int, list[str]] = {}
        for name in wanted:
            if name not in here:
                (folder / name).unlink(missing_ok=True)  # damaged
                sources.setdefault(fetch(found, name, folder, meeting), []).append(name)
        for host, names in sources.items():
            _log.warning(
                "FailureRecovery: %s had no %s of checkpoint %d, and has taken them from %s.",
                hosts.describe(meeting.host),
                ", ".join(names),
                manifest.sequence,
                hosts.describe(host),
            )
        here_now = tuple(name for name in manifest.files if name in here or name in wanted)
        path = self.directory / directory_name(manifest.sequence)
        if folder == path:
            content = replace(manifest, here=here_now).to_bytes()
            if content != (path / MANIFEST_FILE).read_bytes():
                atomic_files.write(path / MANIFEST_FILE, content)
        else:
            commit(self.directory, folder, manifest, here_now)
        super().remove_unfinished()
