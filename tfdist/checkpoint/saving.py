"""One save: every rank writes its files under a temporary name, rank 0 makes them count."""

import logging
import os
import re
import shutil
import time
from pathlib import Path

from tfdist.checkpoint import container, durable, receipts
from tfdist.checkpoint.checkpoint import Checkpoint, directory_name
from tfdist.checkpoint.entry import UNFINISHED_PREFIX
from tfdist.checkpoint.errors import BrokenError, CheckpointError, OtherFormatError
from tfdist.checkpoint.file_record import FileRecord
from tfdist.checkpoint.manifest import MANIFEST, SHARED, Manifest, rank_file
from tfdist.checkpoint.shard import Json, Shard, to_json

UNHARMED = "Earlier checkpoints are unharmed."
_log = logging.getLogger("tfdist")
_ATTEMPT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_MOST_SEQUENCE = 10**10 - 1
# For the manifest, the directories, and what a file system rounds up to.
_SLACK_BYTES = 256 * 1024


class Save:
    """One rank's part of a save.

    Args:
      directory: the store's.
      sequence: the checkpoint's number.
      attempt: a string that is unique for a start of the program.
      rank: this process's rank.
      world: the number of ranks.

    Raises:
      ValueError: if one of them is wrong.
    """

    def __init__(self, directory: Path, sequence: int, attempt: str, rank: int, world: int) -> None:
        _check_arguments(sequence, attempt, rank, world)
        self._directory = directory
        self._sequence = sequence
        self._attempt = attempt
        self._rank = rank
        self._world = world
        self._unfinished = directory / f"{UNFINISHED_PREFIX}{sequence:010d}-{attempt}"

    def run(self, own: Shard, shared: Shard | None, facts: Json, *, peer_timeout_seconds: float) -> Checkpoint | None:
        """Writes this rank's files; rank 0 waits for the others', writes the manifest, and renames the directory.

        Returns:
          On rank 0 the checkpoint.

        Raises:
          OSError: if the file system refuses something.
          CheckpointError: if there is no room, there is a whole checkpoint of this number, or a rank's file is missing.
          ValueError: if something cannot be saved, or this rank has saved this number in this attempt.
        """
        parts = self._parts(own, shared)
        to_json(facts, "the facts")
        try:
            if self._rank == 0:
                self._make_way()
            self._check_space(sum(part.most_bytes for part in parts.values()))
            durable.make_directory(self._unfinished)
            records = {name: self._write(name, part) for name, part in parts.items()}
            if self._rank != 0:
                durable.flush(self._unfinished)
                receipts.write(self._unfinished, self._rank, records[rank_file(self._rank)])
                return None
            others = receipts.collect(self._unfinished, range(1, self._world), timeout_seconds=peer_timeout_seconds)
            records |= {rank_file(rank): record for rank, record in sorted(others.items())}
            return self._commit(Manifest(self._sequence, self._attempt, self._world, time.time(), records, facts))
        except BaseException as error:
            self._give_up(error)
            raise

    def _parts(self, own: Shard, shared: Shard | None) -> dict[str, container.Encoded]:
        if (shared is not None) != (self._rank == 0):
            raise ValueError(
                "What all ranks share is saved by rank 0 alone. Received: "
                f"shared={'None' if shared is None else 'a shard'} from rank {self._rank}. Expected: a shard from rank "
                "0, None from the others."
            )
        if (self._unfinished / rank_file(self._rank)).exists():
            raise ValueError(
                f"Rank {self._rank} saves checkpoint {self._sequence} a second time in one attempt. Received: "
                f"attempt={self._attempt!r}. Expected: each number once, and a string that is unique for a start of "
                "the program."
            )
        parts = {rank_file(self._rank): own} if shared is None else {SHARED: shared, rank_file(0): own}
        return {name: container.encode(part) for name, part in parts.items()}

    def _make_way(self) -> None:
        """Removes a broken checkpoint of this number; refuses if there is a whole one."""
        path = self._directory / directory_name(self._sequence)
        if not os.path.lexists(path):
            return
        try:
            Checkpoint(path)
        except OtherFormatError:
            raise
        except BrokenError as error:
            _log.warning("Checkpoint %d is replaced, as it was broken: %s", self._sequence, error)
            durable.remove(path)
            return
        raise CheckpointError(
            f"There is a checkpoint of this number. Received: sequence={self._sequence}, and {str(path)!r} is whole. "
            "Expected: a number larger than that of the checkpoint that was restored. Restore the newest one first, or "
            "save to another directory."
        )

    def _check_space(self, needed_bytes: int) -> None:
        durable.make_directory(self._directory)
        free = shutil.disk_usage(self._directory).free
        if free < needed_bytes + _SLACK_BYTES:
            raise CheckpointError(
                f"There is no room for checkpoint {self._sequence}. Received: {free:,} bytes free in "
                f"{str(self._directory)!r}. Expected: at least {needed_bytes + _SLACK_BYTES:,}. Free some space there "
                f"(tfdist checkpoints DIR --prune KEEP), keep fewer, or save to another disk. {UNHARMED}"
            )

    def _write(self, name: str, part: container.Encoded) -> FileRecord:
        container.write(self._unfinished / name, part)
        durable.flush(self._unfinished / name)
        return FileRecord.of(self._unfinished / name)

    def _commit(self, manifest: Manifest) -> Checkpoint:
        durable.write(self._unfinished / MANIFEST, manifest.to_bytes())
        durable.flush(self._unfinished)
        path = self._directory / directory_name(self._sequence)
        os.rename(self._unfinished, path)
        durable.flush(self._directory)
        return Checkpoint(path, every_byte=False)

    def _give_up(self, error: BaseException) -> None:
        """Frees the space, and lets rank 0 know."""
        if self._rank == 0:
            shutil.rmtree(self._unfinished, ignore_errors=True)
        elif self._unfinished.is_dir():
            (self._unfinished / rank_file(self._rank)).unlink(missing_ok=True)
            receipts.write_failure(self._unfinished, self._rank, error)


def _check_arguments(sequence: int, attempt: str, rank: int, world: int) -> None:
    if not 0 <= sequence <= _MOST_SEQUENCE:
        raise ValueError(f"The number is wrong. Received: sequence={sequence}. Expected: 0 to {_MOST_SEQUENCE}.")
    if not _ATTEMPT.fullmatch(attempt):
        raise ValueError(
            f"The name of the attempt is wrong. Received: attempt={attempt!r}. Expected: 1 to 100 letters, digits, "
            "'.', '_' or '-', the first a letter or digit."
        )
    if not 0 <= rank < world:
        raise ValueError(f"The rank is wrong. Received: rank={rank}, world={world}. Expected: 0 <= rank < world.")
