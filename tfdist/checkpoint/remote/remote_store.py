"""`RemoteStore`: saves, finds, lists and removes the checkpoints of a training on an object store."""

import contextlib
import json
import logging
import re
import time
from collections.abc import Collection
from pathlib import Path

from tfdist.checkpoint.checkpoint import Checkpoint, CheckpointInfo, directory_name
from tfdist.checkpoint.errors import (
    CheckpointError,
    CorruptCheckpointError,
    OtherFormatError,
    RemoteStoreError,
    no_worker_files,
)
from tfdist.checkpoint.manifest import FileRecord, Manifest, rank_file
from tfdist.checkpoint.remote.commit_log import (
    EpochWriter,
    Position,
    commits,
    last_position,
    mark_removed,
    newest_epoch,
)
from tfdist.checkpoint.remote.parts import block_sizes, folder_of, remove_folder, upload_part
from tfdist.checkpoint.remote.remote_checkpoint import RemoteCheckpoint
from tfdist.checkpoint.remote.remote_objects import Objects, connect_store
from tfdist.checkpoint.remote.run_ownership import BEAT_SECONDS, RunOwnership
from tfdist.checkpoint.shard import Json, Shard, dump_metadata
from tfdist.checkpoint.sharded_save import (
    EARLIER_INTACT,
    SavingRanks,
    WorkerFiles,
    check_save,
    encode_parts,
    failure_receipt_of,
    log_given_up,
    number_exists,
    receipt_name,
    receipt_of,
    second_save,
    wait_for_receipts,
)
from tfdist.utils.argument_checks import check_seconds, check_whole_number

_FOLDER = re.compile(r"parts/((\d{10})-([^/]+))/")
_MAX_PAUSE_SECONDS = 1.0  # between two looks for receipts, of which each is a request
_FAILURE_PATIENCE_SECONDS = _CLEANING_PATIENCE_SECONDS = 30.0
_log = logging.getLogger("tfdist")


class RemoteStore:
    """The prefix of an object store that holds the checkpoints of a training: `CheckpointStore` for addresses.

    A training owns the run while it saves, see `RunOwnership`; a save takes the run over if this object does not own
    it. A save that ends with a `RemoteStoreError` may be committed; the next one settles that.

    Args:
        url: An address that fsspec knows.
        keep: As for `CheckpointStore`.
        peer_timeout_seconds: How long the chief waits for the files of the other ranks.
        objects: Requests to the store, if not those of `url`.
        beat_seconds: How often an owner shows that it lives.

    Attributes:
        location: The address.
        directory: None: there is no directory.
        peer_timeout_seconds: As given.

    Raises:
        ImportError: If fsspec, or its library for this store, is not installed.
        ValueError: If an argument is invalid.
    """

    directory: Path | None = None

    def __init__(
        self,
        url: str,
        *,
        keep: int = 3,
        peer_timeout_seconds: float = 60.0,
        objects: Objects | None = None,
        beat_seconds: float = BEAT_SECONDS,
    ) -> None:
        check_whole_number("keep", keep, at_least=1)
        check_seconds("peer_timeout_seconds", peer_timeout_seconds)
        self.location, self.peer_timeout_seconds = url, peer_timeout_seconds
        self._keep = keep
        self._objects = Objects(*connect_store(url)) if objects is None else objects
        self._beat_seconds = beat_seconds
        self._ownership = RunOwnership(self._objects, beat_seconds=beat_seconds)
        self._known_complete: set[Position] = set()
        self._verified: RemoteCheckpoint | None = None  # not copied a second time when it is opened
        self._saved_in: EpochWriter | None = None
        self._present: dict[Position, str] = {}  # with the folders, when `_saved_in` has saved
        self._begun: set[tuple[str, int]] = set()  # folders and ranks
        self._orphans: list[str] = []  # folders of saves that will not be committed

    def lock(self) -> RunOwnership:
        """Returns what gives a process the right to save, a new one that later saves use."""
        # The `fit` of an earlier one may end, and release it, when the next has begun.
        self._ownership = RunOwnership(self._objects, beat_seconds=self._beat_seconds)
        return self._ownership

    def refresh(self) -> None:
        """Does nothing: what is committed is seen at once."""

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
        """Saves a checkpoint, see `CheckpointStore.save`.

        Returns:
            The checkpoint on the chief: it is committed.

        Raises:
            RemoteStoreError: If it is not, or unknown to be, committed. Earlier checkpoints are intact.
            SupersededError: If another process has taken over the training.
            CheckpointError: If a complete checkpoint has this number.
            ValueError: If an argument is invalid.
        """
        check_save(sequence, attempt, rank, num_ranks)
        saving = SavingRanks(tuple(range(num_ranks))) if saving is None else saving
        saving.check_shared(rank, shared_shard)
        if worker_files is not None:
            raise no_worker_files(self.location)
        objects, folder = self._objects.for_operation(), folder_of(sequence, attempt)
        if (folder, rank) in self._begun:  # its parts may be those of a commit
            raise second_save(sequence, attempt, rank)
        is_chief = rank == saving.chief
        try:
            parts = encode_parts(rank, rank_shard, shared_shard)
            metadata = json.loads(dump_metadata(metadata))  # as it will be read
            writer = self._begin(objects, sequence) if is_chief else None
            self._begun.add((folder, rank))
            records = {name: upload_part(objects, folder, name, part) for name, part in parts.items()}
            if writer is None:
                objects.put(f"{folder}/{receipt_name(rank)}", receipt_of(records[rank_file(rank)]))
                return None
            peers = self._peer_records(objects, folder, saving)
        except BaseException as error:
            self._report(error, folder, rank, is_chief=is_chief)
            if isinstance(error, RemoteStoreError):
                message = f"Checkpoint {sequence} could not be written. {error} {EARLIER_INTACT}"
                raise RemoteStoreError(message) from error
            raise
        lost_ranks = sorted({*saving.ranks[1:]} - peers.keys())
        if lost_ranks and saving.needs_all:
            self._orphans.append(folder)
            log_given_up(sequence, lost_ranks)
            return None
        records |= {rank_file(peer): record for peer, record in sorted(peers.items())}
        missing = tuple(other for other in range(num_ranks) if rank_file(other) not in records)
        manifest = Manifest(sequence, attempt, num_ranks, time.time(), records, metadata, missing)
        self._commit(objects, writer, manifest)
        self._verified = None
        self._clean_up()
        return RemoteCheckpoint(self._objects, manifest)

    def newest(self) -> tuple[Checkpoint | None, list[str]]:
        """Finds the newest complete checkpoint, copies it to this host, and verifies all its checksums.

        Returns:
            The checkpoint, or None; and the reasons why newer ones were skipped.

        Raises:
            RemoteStoreError: If the store does not answer.
            OtherFormatError: If a newer checkpoint has another format.
        """
        objects = self._objects.for_operation()
        while True:
            last, skipped = last_position(objects), []
            for position, content in commits(objects):
                try:
                    checkpoint = RemoteCheckpoint(self._objects, Manifest.from_bytes(content), read_all=True)
                except CorruptCheckpointError as error:
                    if _is_present(objects, position):  # else it was removed meanwhile
                        skipped.append(f"{_name_of(position, content)}: {error}")
                else:
                    self._known_complete.add(position)
                    self._verified = checkpoint
                    return checkpoint, skipped
            if last_position(objects) == last:  # else a training may have saved later ones, and removed all these
                return None, skipped

    def open(self, sequence: int) -> Checkpoint:
        """Opens one checkpoint. Its files are copied and verified when they are read.

        Raises:
            CorruptCheckpointError: If there is none with this number.
            RemoteStoreError: If the store does not answer.
        """
        if self._verified is not None and self._verified.sequence == sequence:
            return self._verified
        found, present = [], []
        for _, content in commits(self._objects.for_operation()):
            with contextlib.suppress(CorruptCheckpointError):
                manifest = Manifest.from_bytes(content)
                present.append(str(manifest.sequence))
                if manifest.sequence == sequence:
                    found.append(manifest)
        for manifest in found:
            # A corrupt one of this number may have been replaced, or skipped: another must be complete to be chosen.
            with contextlib.suppress(CorruptCheckpointError):
                return RemoteCheckpoint(self._objects, manifest, read_all=manifest is not found[-1])
        raise CorruptCheckpointError(
            f"Checkpoint {sequence} is not committed. Received: no manifest of this number in {self.location!r}. "
            f"Expected: one that was saved there. Checkpoints there: {', '.join(present) or 'none'}."
        )

    def list_checkpoints(self, *, verify_checksums: bool = False) -> list[CheckpointInfo]:
        """Lists the checkpoints and unfinished saves, oldest first.

        Args:
            verify_checksums: Whether to compute all checksums, which reads every byte, or only to compare sizes.

        Raises:
            RemoteStoreError: If the store does not answer.
        """
        objects = self._objects.for_operation()
        sizes = objects.sizes("parts")
        entries, folders = [], set()
        for position, content in commits(objects):
            with contextlib.suppress(CorruptCheckpointError, OtherFormatError):
                manifest = Manifest.from_bytes(content)
                folders.add(folder_of(manifest.sequence, manifest.attempt))
            info = self._inspect(objects, position, content, sizes, verify_checksums=verify_checksums)
            if info.status != "corrupt" or _is_present(objects, position):
                entries.append(info)
        entries += [
            CheckpointInfo(
                sequence, Path(folder), "unfinished", "save in progress or interrupted", _size_below(folder, sizes)
            )
            for sequence, _, folder in _folders(sizes)
            if folder not in folders
        ]
        return sorted(entries, key=lambda info: info.sequence)

    def remove_unfinished(self, current_attempt: str | None = None) -> None:
        """Removes the parts of unfinished saves of earlier attempts. Logs what cannot be removed.

        Does nothing if this object does not own the run, or another process has taken it over.

        Args:
            current_attempt: The saves of this attempt stay; other ranks may have begun them.
        """
        objects = self._objects.for_operation(_CLEANING_PATIENCE_SECONDS)
        try:
            unfinished = self._unfinished(current_attempt)
            writer = self._ownership.writer
            if writer is None or newest_epoch(objects) != writer.epoch:
                return  # a later owner may have begun them
            for folder in unfinished:
                remove_folder(objects, folder)
        except (RemoteStoreError, OtherFormatError) as error:
            _log.warning("Unfinished saves could not be removed: %s", error)

    def prune(self, keep: int, *, dry_run: bool = False) -> list[Path]:
        """Removes unfinished saves and all but the `keep` newest complete checkpoints, see `CheckpointStore.prune`.

        It takes the run over meanwhile: what a training was uploading would be incomplete when it is committed.

        Returns:
            The names of what was removed, or would be.

        Raises:
            CheckpointError: If a training saves there.
            RemoteStoreError: If the store does not answer.
            ValueError: If `keep` is invalid.
        """
        check_whole_number("keep", keep, at_least=1)
        if dry_run or self._ownership.is_held:
            return self._prune(keep, dry_run=dry_run)
        lock = self.lock()
        lock.acquire(BEAT_SECONDS)
        try:
            return self._prune(keep, dry_run=False)
        finally:
            lock.release()

    def _prune(self, keep: int, *, dry_run: bool) -> list[Path]:
        objects = self._objects.for_operation()
        sizes = objects.sizes("parts")
        old: list[tuple[Position, bytes]] = []
        corrupt: list[tuple[Position, bytes]] = []
        num_kept = 0
        for position, content in commits(objects):
            info = self._inspect(objects, position, content, sizes, verify_checksums=num_kept < keep)
            if info.status == "corrupt":
                corrupt.append((position, content))
            elif info.status == "complete" and num_kept == keep:
                old.append((position, content))
            elif info.status == "complete":
                num_kept += 1
        removed = [*old, *corrupt] if num_kept else []
        unfinished = self._unfinished(None)
        if not dry_run:
            for position, content in removed:
                mark_removed(objects, position, with_older=False)
                with contextlib.suppress(CorruptCheckpointError):
                    _remove_files(objects, Manifest.from_bytes(content))
            for folder in unfinished:
                remove_folder(objects, folder)
        return sorted([*(Path(_name_of(*entry)) for entry in removed), *map(Path, unfinished)])

    def _begin(self, objects: Objects, sequence: int) -> EpochWriter:
        """Returns what commits; finds what is there when this owner saves for the first time."""
        if self._ownership.writer is None:
            self._ownership.take_over()
        writer = self._ownership.writer
        assert writer is not None
        if writer is not self._saved_in:
            self._present = {}
            for position, content in commits(objects):
                with contextlib.suppress(CorruptCheckpointError, OtherFormatError):
                    manifest = Manifest.from_bytes(content)
                    self._present[position] = folder_of(manifest.sequence, manifest.attempt)
                    if manifest.sequence == sequence and position in self._known_complete:
                        raise number_exists(sequence, self.location)
            self._saved_in = writer
        elif any(_sequence_of(self._present[position]) == sequence for position in self._known()):
            raise number_exists(sequence, self.location)
        return writer

    def _peer_records(self, objects: Objects, folder: str, saving: SavingRanks) -> dict[int, FileRecord]:
        def find(missing: Collection[int]) -> dict[int, bytes]:
            found = {rank: objects.get(f"{folder}/{receipt_name(rank)}") for rank in missing}
            return {rank: receipt for rank, receipt in found.items() if receipt is not None}

        try:
            return wait_for_receipts(
                find,
                saving.ranks[1:],
                self.location,
                timeout_seconds=self.peer_timeout_seconds,
                lost=saving.lost or tuple,
                max_pause_seconds=_MAX_PAUSE_SECONDS,
            )
        except RemoteStoreError:
            raise
        except CheckpointError as error:  # the rank may have met the same trouble; training can continue
            raise RemoteStoreError(str(error)) from error

    def _report(self, error: BaseException, folder: str, rank: int, *, is_chief: bool) -> None:
        """Frees the space after a failure, later, and reports the failure of another rank to the chief."""
        if is_chief:
            if (folder, rank) in self._begun:
                self._orphans.append(folder)
            return
        with contextlib.suppress(RemoteStoreError):
            objects = self._objects.for_operation(_FAILURE_PATIENCE_SECONDS)
            objects.put(f"{folder}/{receipt_name(rank)}", failure_receipt_of(error))

    def _commit(self, objects: Objects, writer: EpochWriter, manifest: Manifest) -> None:
        try:
            settled, dropped = writer.commit(objects, manifest.to_bytes())
        except RemoteStoreError as error:
            raise RemoteStoreError(
                f"It is unknown whether checkpoint {manifest.sequence} is committed; the next save finds out. {error} "
                f"{EARLIER_INTACT}"
            ) from error
        for position, content in settled:
            committed = Manifest.from_bytes(content)
            self._known_complete.add(position)
            self._present[position] = folder_of(committed.sequence, committed.attempt)
            if committed.sequence != manifest.sequence:
                _log.warning("Checkpoint %d, of which it was unknown, is committed.", committed.sequence)
        for content in dropped:
            lost = Manifest.from_bytes(content)
            self._orphans.append(folder_of(lost.sequence, lost.attempt))

    def _clean_up(self) -> None:
        """Removes checkpoints older than the `keep` newest known complete ones, and parts of failed saves."""
        objects = self._objects.for_operation(_CLEANING_PATIENCE_SECONDS)
        try:
            kept = self._known()[-self._keep :]
            old = sorted(position for position in self._present if position < kept[0])
            if len(kept) == self._keep and old:
                mark_removed(objects, old[-1], with_older=True)
                self._orphans += [self._present.pop(position) for position in old]
                self._known_complete = set(kept)
            while self._orphans:
                remove_folder(objects, self._orphans[-1])
                self._orphans.pop()
        except RemoteStoreError as error:
            _log.warning("Older checkpoints could not be removed: %s", error)

    def _known(self) -> list[Position]:
        return sorted(self._known_complete & self._present.keys())

    def _unfinished(self, current_attempt: str | None) -> list[str]:
        objects = self._objects.for_operation()
        listed = _folders(objects.sizes("parts"))
        used = set()
        for _, content in commits(objects):  # after the list: what was listed may be committed since
            with contextlib.suppress(CorruptCheckpointError):
                manifest = Manifest.from_bytes(content)
                used.add(folder_of(manifest.sequence, manifest.attempt))
        return [folder for _, attempt, folder in listed if folder not in used and attempt != current_attempt]

    def _inspect(
        self, objects: Objects, position: Position, content: bytes, sizes: dict[str, int], *, verify_checksums: bool
    ) -> CheckpointInfo:
        path, sequence, size = Path(_name_of(position, content)), 0, 0
        try:
            manifest = Manifest.from_bytes(content)
            sequence, folder = manifest.sequence, folder_of(manifest.sequence, manifest.attempt)
            size = sum(record.size_bytes for record in manifest.files.values())
            RemoteCheckpoint(self._objects, manifest, read_all=verify_checksums)
            for name, record in manifest.files.items() if not verify_checksums else ():
                _check_sizes(objects, folder, name, record, sizes)
        except OtherFormatError as error:
            return CheckpointInfo(sequence, path, "other format", str(error), size)
        except CorruptCheckpointError as error:
            return CheckpointInfo(sequence, path, "corrupt", str(error), size)
        described = manifest.num_ranks, manifest.saved_at, manifest.metadata
        return CheckpointInfo(sequence, path, "complete", "", size, *described)


def _is_present(objects: Objects, position: Position) -> bool:
    return any(position == other for other, _ in commits(objects))


def _name_of(position: Position, content: bytes) -> str:
    with contextlib.suppress(CorruptCheckpointError, OtherFormatError):
        return directory_name(Manifest.from_bytes(content).sequence)
    return position.key


def _sequence_of(folder: str) -> int:
    return int(folder.removeprefix("parts/").partition("-")[0])


def _folders(sizes: dict[str, int]) -> list[tuple[int, str, str]]:
    """Returns sequence, attempt and key of the folders of saves in a list."""
    matches = filter(None, map(_FOLDER.match, sizes))
    return sorted({(int(match[2]), match[3], f"parts/{match[1]}") for match in matches})


def _size_below(folder: str, sizes: dict[str, int]) -> int:
    return sum(size for key, size in sizes.items() if key.startswith(f"{folder}/"))


def _check_sizes(objects: Objects, folder: str, name: str, record: FileRecord, sizes: dict[str, int]) -> None:
    for key, expected in block_sizes(folder, name, record.size_bytes).items():
        if sizes.get(key) == expected:
            continue
        content = objects.get(key)  # a list may be old
        if content is None:
            raise CorruptCheckpointError(f"{key} is missing")
        if len(content) != expected:
            raise CorruptCheckpointError(f"{key} has {len(content)} bytes, not the {expected} that were written")


def _remove_files(objects: Objects, manifest: Manifest) -> None:
    folder = folder_of(manifest.sequence, manifest.attempt)
    keys = [key for name, record in manifest.files.items() for key in block_sizes(folder, name, record.size_bytes)]
    remove_folder(objects, folder, keys)
