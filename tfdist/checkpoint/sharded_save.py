"""One save: every rank writes its files to an unfinished directory, one of them, the chief, commits by renaming it.

The other ranks report their files to the chief by receipts: small files in that directory, which all ranks share. The
chief also records the files that other processes write for it: the workers whose devices hold the stages of a model.
"""

import contextlib
import errno
import json
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from tfdist.checkpoint.checkpoint import Checkpoint, directory_name, unfinished_name
from tfdist.checkpoint.direct_file import FileWriter, write_direct
from tfdist.checkpoint.errors import CheckpointError, CorruptCheckpointError, OtherFormatError
from tfdist.checkpoint.manifest import MANIFEST_FILE, SHARED_FILE, FileRecord, Manifest, rank_file
from tfdist.checkpoint.shard import EncodedShard, Json, Shard, dump_metadata, encode_shard, write_shard
from tfdist.utils import atomic_files

EARLIER_INTACT = "Earlier checkpoints are intact."
_log = logging.getLogger("tfdist")
_ATTEMPT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_MAX_SEQUENCE = 10**10 - 1
# For the manifest, the directories, and rounding of the file system.
_RESERVE_BYTES = 256 * 1024
_MIN_PAUSE_SECONDS = 0.001
_MAX_PAUSE_SECONDS = 0.05
_VANISHED = (errno.ENOENT, errno.ESTALE)
# Network file systems show the files of other hosts late, after some seconds at most.
_VISIBLE_WITHIN_SECONDS = 30.0
# How long a program that has failed waits at exit for ranks that failed with the same error.
_TIMEOUT_AT_EXIT_SECONDS = 60.0


class WorkerFiles(Protocol):
    """What the workers write into one checkpoint."""

    @property
    def size_bytes(self) -> int:
        """The size of their tensors."""
        ...

    def write(self, directory: Path) -> Mapping[str, int | None]:
        """Makes the workers write their files into a directory, given by an absolute path.

        Returns:
            The size of each file by its name, or None if it is not known here.

        Raises:
            CheckpointError: If a worker cannot write its file.
        """
        ...


@dataclass(frozen=True)
class SavingRanks:
    """The ranks that save a checkpoint.

    Attributes:
        ranks: The first of them is the chief: it writes what is equal on all, and commits.
        lost: Returns those whose files will not come if they are not there yet. The chief asks while it waits, and
            completes the checkpoint without them. For one of them that is alive its own save ends without an error.
            `None` if a save fails without all files.
        needs_all: Whether a save in which files of one that is lost are missing is given up: nobody else has what is
            in them.
    """

    ranks: tuple[int, ...]
    lost: Callable[[], Collection[int]] | None = None
    needs_all: bool = False

    @property
    def chief(self) -> int:
        """The rank that commits."""
        return self.ranks[0]

    def check_shared(self, rank: int, shared_shard: Shard | None) -> None:
        """Raises a ValueError unless the chief, and only it, saves what is equal on all ranks."""
        if (shared_shard is not None) != (rank == self.chief):
            raise ValueError(
                f"Only rank {self.chief} saves the shared shard. Received: "
                f"shared_shard={'None' if shared_shard is None else 'a shard'} from rank {rank}. Expected: a "
                f"shard from rank {self.chief}, None from the others."
            )


class ShardedSave:
    """One rank's part of a save."""

    def __init__(
        self,
        directory: Path,
        sequence: int,
        attempt: str,
        rank: int,
        num_ranks: int,
        saving: SavingRanks | None = None,
        write: FileWriter = write_direct,
        reused_bytes: int = 0,
    ) -> None:
        """Describes the save; by default all ranks save, and rank 0 is the chief.

        `write` writes files of shards, `reused_bytes` of them to where other files were.
        """
        self._write, self._reused_bytes = write, reused_bytes
        check_save(sequence, attempt, rank, num_ranks)
        self._directory = directory
        self._sequence = sequence
        self._attempt = attempt
        self._rank = rank
        self._num_ranks = num_ranks
        self._saving = SavingRanks(tuple(range(num_ranks))) if saving is None else saving
        self._is_chief = rank == self._saving.chief
        self._unfinished = directory / unfinished_name(sequence, attempt)

    def run(
        self,
        rank_shard: Shard,
        shared_shard: Shard | None,
        metadata: Json,
        *,
        peer_timeout_seconds: float,
        worker_files: WorkerFiles | None = None,
    ) -> Checkpoint | None:
        """Writes this rank's files. The chief then waits for the others, writes the manifest and renames the directory.

        The chief also makes workers write `worker_files`, if there are any.

        Returns:
            The checkpoint on the chief, None on other ranks, and if the save is given up.

        Raises:
            OSError: If the file system fails.
            CheckpointError: If there is not enough space, a complete checkpoint has this number, or a rank's file is
                missing.
            ValueError: If something cannot be saved, or this rank has saved this number in this attempt.
        """
        self._check_shards(shared_shard)
        try:
            if not self._is_chief:
                atomic_files.make_directory(self._unfinished)  # where the chief looks for a failure of this rank
            parts = encode_parts(self._rank, rank_shard, shared_shard)
            metadata = json.loads(dump_metadata(metadata))  # as it will be read
            if self._is_chief:
                self._remove_corrupt()
            worker_bytes = 0 if worker_files is None else worker_files.size_bytes
            self._check_space(sum(part.size_bytes for part in parts.values()) + worker_bytes)
            atomic_files.make_directory(self._unfinished)
            records = {
                name: FileRecord(part.size_bytes, write_shard(self._unfinished / name, part, self._write))
                for name, part in parts.items()
            }
            if worker_files is not None:
                records |= record_worker_files(self._unfinished, worker_files.write(self._unfinished.absolute()))
            if not self._is_chief:
                atomic_files.flush(self._unfinished)
                write_receipt(self._unfinished, self._rank, records[rank_file(self._rank)])
                return None
            peer_records = collect_receipts(
                self._unfinished,
                self._saving.ranks[1:],
                timeout_seconds=peer_timeout_seconds,
                lost=self._saving.lost or tuple,
            )
            lost_ranks = sorted({*self._saving.ranks[1:]} - peer_records.keys())
            if lost_ranks and self._saving.needs_all:
                self._give_up(lost_ranks)
                return None
            records |= {rank_file(rank): record for rank, record in sorted(peer_records.items())}
            missing = tuple(rank for rank in range(self._num_ranks) if rank_file(rank) not in records)
            for rank in missing:  # a rank may have been lost before its receipt
                (self._unfinished / rank_file(rank)).unlink(missing_ok=True)
            return self._commit(
                Manifest(self._sequence, self._attempt, self._num_ranks, time.time(), records, metadata, missing)
            )
        except BaseException as error:
            if isinstance(error, OSError) and error.errno in _VANISHED and self._is_over_without_this_rank():
                _log.debug("Checkpoint %d was committed or given up before this rank had written.", self._sequence)
                return None
            self._clean_up(error)
            raise

    def _is_over_without_this_rank(self) -> bool:
        may_be_left_out = not self._is_chief and self._saving.lost is not None
        return may_be_left_out and os.path.isdir(self._directory) and not os.path.isdir(self._unfinished)

    def _give_up(self, lost_ranks: list[int]) -> None:
        shutil.rmtree(self._unfinished, ignore_errors=True)
        log_given_up(self._sequence, lost_ranks)

    def _check_shards(self, shared_shard: Shard | None) -> None:
        self._saving.check_shared(self._rank, shared_shard)
        if (self._unfinished / rank_file(self._rank)).exists():
            raise second_save(self._sequence, self._attempt, self._rank)

    def _remove_corrupt(self) -> None:
        """Removes a corrupt or partial checkpoint of this number; raises an error for a complete one."""
        path = self._directory / directory_name(self._sequence)
        if not os.path.lexists(path):
            return
        try:
            if not Checkpoint(path).has_all_files:  # nor could it be restored, or the number would be a later one
                raise CorruptCheckpointError("other hosts had some of its files")
        except OtherFormatError:
            raise
        except CorruptCheckpointError as error:
            _log.warning("Checkpoint %d is replaced because it is not complete: %s", self._sequence, error)
            atomic_files.remove(path)
            return
        raise number_exists(self._sequence, str(path))

    def _check_space(self, needed_bytes: int) -> None:
        atomic_files.make_directory(self._directory)
        free = shutil.disk_usage(self._directory).free + self._reused_bytes
        if free < needed_bytes + _RESERVE_BYTES:
            raise CheckpointError(
                f"Not enough disk space for checkpoint {self._sequence}. Received: {free:,} bytes free in "
                f"{str(self._directory)!r}. Expected: at least {needed_bytes + _RESERVE_BYTES:,}. Free some space "
                "there (tfdist checkpoints DIR --prune KEEP), keep fewer, or save to another disk. "
                f"{EARLIER_INTACT}"
            )

    def _commit(self, manifest: Manifest) -> Checkpoint:
        with open(self._unfinished / MANIFEST_FILE, "xb") as file:  # the renaming below is what must be atomic
            file.write(manifest.to_bytes())
            file.flush()
            os.fsync(file.fileno())
        atomic_files.flush(self._unfinished)
        path = self._directory / directory_name(self._sequence)
        os.rename(self._unfinished, path)
        atomic_files.flush(self._directory)
        return Checkpoint(path, written=manifest)

    def _clean_up(self, error: BaseException) -> None:
        """Frees the space after a failure, and reports the failure to the chief."""
        if self._is_chief:
            shutil.rmtree(self._unfinished, ignore_errors=True)
        elif self._unfinished.is_dir():
            (self._unfinished / rank_file(self._rank)).unlink(missing_ok=True)
            write_failure_receipt(self._unfinished, self._rank, error)


def log_given_up(sequence: int, lost_ranks: list[int]) -> None:
    """Warns of a save that is given up because of parts that nobody else has."""
    _log.warning(
        "Checkpoint %d is given up: a worker was lost before its part, which nobody else has, was written. "
        "Received: no part of the ranks %s. Expected: all parts within an accumulation of gradients. The next "
        "checkpoint that is due is saved. %s",
        sequence,
        lost_ranks,
        EARLIER_INTACT,
    )


def number_exists(sequence: int, where: str) -> CheckpointError:
    """Returns the error of a save whose number a complete checkpoint has."""
    return CheckpointError(
        f"A checkpoint with this number exists. Received: sequence={sequence}, and {where!r} is "
        "complete. Expected: a number larger than that of the restored checkpoint. Restore the newest one first, "
        "or save to another directory."
    )


def second_save(sequence: int, attempt: str, rank: int) -> ValueError:
    """Returns the error of a rank that has saved this number in this attempt."""
    return ValueError(
        f"Rank {rank} saves checkpoint {sequence} a second time in one attempt. Received: attempt={attempt!r}. "
        "Expected: each number once, and a string that is unique to a start of the program."
    )


def encode_parts(rank: int, rank_shard: Shard, shared_shard: Shard | None) -> dict[str, EncodedShard]:
    """Returns the files of a rank by name.

    Raises:
        ValueError: If something cannot be saved.
    """
    shards = {} if shared_shard is None else {SHARED_FILE: shared_shard}
    shards[rank_file(rank)] = rank_shard
    return {name: encode_shard(shard) for name, shard in shards.items()}


def check_save(sequence: int, attempt: str, rank: int, num_ranks: int) -> None:
    """Raises a ValueError for an invalid number, attempt or rank of a save."""
    if not 0 <= sequence <= _MAX_SEQUENCE:
        raise ValueError(f"Invalid sequence number. Received: sequence={sequence}. Expected: 0 to {_MAX_SEQUENCE}.")
    if not _ATTEMPT.fullmatch(attempt):
        raise ValueError(
            f"Invalid name of the attempt. Received: attempt={attempt!r}. Expected: 1 to 100 letters, digits, '.', "
            "'_' or '-', the first a letter or digit."
        )
    if not 0 <= rank < num_ranks:
        raise ValueError(
            f"Invalid rank. Received: rank={rank}, num_ranks={num_ranks}. Expected: 0 <= rank < num_ranks."
        )


def write_receipt(directory: Path, rank: int, record: FileRecord) -> None:
    """Reports that the file of `rank` is on disk."""
    atomic_files.write(directory / receipt_name(rank), receipt_of(record))


def write_failure_receipt(directory: Path, rank: int, error: BaseException) -> None:
    """Reports, if possible, that the file of `rank` will not be written, so that the chief does not wait for it."""
    with contextlib.suppress(OSError):
        atomic_files.write(directory / receipt_name(rank), failure_receipt_of(error))


def collect_receipts(
    directory: Path, ranks: Iterable[int], *, timeout_seconds: float, lost: Callable[[], Collection[int]] = tuple
) -> dict[int, FileRecord]:
    """Waits for the receipts of `ranks` in a directory and removes them, see `wait_for_receipts`.

    Raises:
        CheckpointError: If receipts are missing after `timeout_seconds`, or one reports a failure.
        OSError: If the directory cannot be read or was removed.
    """

    def find(missing: Collection[int]) -> dict[int, bytes]:
        # Lists the directory instead of looking each file up: network file systems cache that a file is missing.
        present = set(os.listdir(directory)) if missing else set()
        names = {rank: name for rank in missing if (name := receipt_name(rank)) in present}
        return {rank: (directory / name).read_bytes() for rank, name in names.items()}

    records = wait_for_receipts(find, ranks, str(directory), timeout_seconds=timeout_seconds, lost=lost)
    for rank in records:
        (directory / receipt_name(rank)).unlink()
    return records


def wait_for_receipts(
    find: Callable[[Collection[int]], Mapping[int, bytes]],
    ranks: Iterable[int],
    where: str,
    *,
    timeout_seconds: float,
    lost: Callable[[], Collection[int]],
    max_pause_seconds: float = _MAX_PAUSE_SECONDS,
) -> dict[int, FileRecord]:
    """Waits for the receipts of `ranks`. Waits at most 60 s if the program exits meanwhile.

    `find` returns those of the given ranks that are there. Receipts of ranks that are `lost` are left out unless they
    are there.

    Raises:
        CheckpointError: If receipts are missing after `timeout_seconds`, or one reports a failure.
    """
    missing = set(ranks)
    records: dict[int, FileRecord] = {}
    end = time.monotonic() + timeout_seconds
    is_exiting = False
    pause = _MIN_PAUSE_SECONDS
    while True:
        gone = lost()  # before looking: what a lost rank has written is there
        for rank, receipt in find(missing).items():
            missing.remove(rank)
            records[rank] = _read_receipt(receipt, rank)
        missing.difference_update(gone)
        if not missing:
            return records
        if not is_exiting and not threading.main_thread().is_alive():
            is_exiting, end = True, min(end, time.monotonic() + _TIMEOUT_AT_EXIT_SECONDS)
        if time.monotonic() > end:
            raise CheckpointError(_timeout_message(sorted(missing), timeout_seconds, where))
        time.sleep(pause)
        pause = min(2 * pause, max_pause_seconds)


def receipt_name(rank: int) -> str:
    """Returns the name of the receipt of a rank."""
    return f"rank-{rank}.receipt"


def receipt_of(record: FileRecord) -> bytes:
    """Returns the receipt of a file."""
    return json.dumps(asdict(record)).encode()


def failure_receipt_of(error: BaseException) -> bytes:
    """Returns what a rank writes in place of a receipt if its file will not be written."""
    return json.dumps({"error": f"{type(error).__name__}: {error}"}).encode()


def _read_receipt(receipt: bytes, rank: int) -> FileRecord:
    content = json.loads(receipt)
    if "error" in content:
        raise CheckpointError(f"Rank {rank} could not write its part of the checkpoint. Received: {content['error']}")
    return FileRecord(**content)


def _timeout_message(ranks: list[int], timeout_seconds: float, where: str) -> str:
    who = f"Rank {ranks[0]} has" if len(ranks) == 1 else f"Ranks {', '.join(map(str, ranks))} have"
    return (
        f"{who} not written a part of the checkpoint within {timeout_seconds:g} s. Expected: a file of every rank "
        f"in {where!r}. All ranks must see the same directory, on a file system they share, and save the same "
        "sequence number in the same attempt; if they do and are slow, raise peer_timeout_seconds of "
        "FailureRecovery."
    )


def record_worker_files(directory: Path, sizes: Mapping[str, int | None]) -> dict[str, FileRecord]:
    """Returns the records of files that workers have written, when they are complete as this process sees them.

    They are read once, in small pieces, and flushed to the disk: TensorFlow does not flush what it writes.

    Raises:
        CheckpointError: If this process does not see a file, or another size.
        OSError: If a file cannot be read or flushed.
    """
    _wait_until_visible(directory, sizes)
    records = {}
    for name in sizes:
        atomic_files.flush(directory / name)
        records[name] = FileRecord.of(directory / name)
    return records


def _wait_until_visible(directory: Path, sizes: Mapping[str, int | None]) -> None:
    end = time.monotonic() + _VISIBLE_WITHIN_SECONDS
    while True:
        # Lists the directory instead of looking each file up: network file systems cache that a file is missing.
        present = set(os.listdir(directory))
        missing = [name for name, size in sizes.items() if name not in present or not _has(directory / name, size)]
        if not missing:
            return
        if time.monotonic() > end:
            visible_file = (
                f"{missing[0]} of {(directory / missing[0]).stat().st_size} bytes" if missing[0] in present else ""
            )
            raise CheckpointError(
                "This process does not see what a worker has written into a checkpoint. Received: "
                f"{visible_file or f'no {missing[0]}'} in {str(directory)!r} after {_VISIBLE_WITHIN_SECONDS:g} s. "
                f"Expected: {sizes[missing[0]] or 'some'} bytes, on a file system that all workers share. Mount one on "
                "all hosts, and pass its path to FailureRecovery. Earlier checkpoints are intact."
            )
        time.sleep(_MAX_PAUSE_SECONDS)


def _has(path: Path, size: int | None) -> bool:
    return size is None or path.stat().st_size == size
