"""The directory that holds the checkpoints of a training."""

import logging
import os
from collections.abc import Callable
from pathlib import Path

from tfdist.checkpoint import durable, entry
from tfdist.checkpoint.checkpoint import Checkpoint, directory_name
from tfdist.checkpoint.entry import Entry
from tfdist.checkpoint.errors import BrokenError, explained
from tfdist.checkpoint.saving import UNHARMED, Save
from tfdist.checkpoint.shard import Json, Shard

_log = logging.getLogger("tfdist")


class CheckpointStore:
    """The directory that holds the checkpoints of a training; one training at a time saves there.

    Args:
      directory: it is made by the first save. All ranks must see the same one.
      keep: how many whole checkpoints are kept at least. A save removes what is older than the `keep` newest of those
        that this object has written or verified: after a start there may be up to `2 * keep - 1`, and a broken one
        never counts.
      peer_timeout_seconds: how long rank 0 waits for the other ranks' files.

    Attributes:
      directory: as given.

    Raises:
      ValueError: if `keep` is less than 1 or the time is negative.
    """

    def __init__(self, directory: str | os.PathLike[str], *, keep: int = 3, peer_timeout_seconds: float = 60.0) -> None:
        _check_keep(keep)
        if not peer_timeout_seconds >= 0:
            raise ValueError(
                f"The time is wrong. Received: peer_timeout_seconds={peer_timeout_seconds}. Expected: >= 0."
            )
        self.directory = Path(directory)
        self._keep = keep
        self._peer_timeout_seconds = peer_timeout_seconds
        self._known_whole: set[int] = set()

    def save(
        self,
        sequence: int,
        attempt: str,
        *,
        rank: int,
        world: int,
        own: Shard,
        shared: Shard | None,
        facts: Json,
    ) -> Checkpoint | None:
        """Saves a checkpoint; every rank calls it with the same `sequence`, `attempt` and `world`.

        Args:
          sequence: its number, larger than that of the checkpoint that was restored. A whole checkpoint is never
            replaced, a broken one of the same number is.
          attempt: a string that is unique for a start of the program: letters, digits, ".", "_", "-".
          rank: this process's rank.
          world: the number of ranks.
          own: what differs between ranks. The arrays must not change until this returns.
          shared: what is equal on all ranks, from rank 0; None from the others.
          facts: what is to be known of it without reading tensors, as JSON; rank 0's count.

        Returns:
          On rank 0 the checkpoint, which is on the disk now; None on the others, whose files are.

        Raises:
          CheckpointError: if it cannot be written; the message says what to do. Earlier ones are unharmed, and what was
            written of this one is removed.
          ValueError: if an argument is wrong.
        """
        save = Save(self.directory, sequence, attempt, rank, world)
        with explained(f"Checkpoint {sequence} could not be written", self.directory, UNHARMED):
            saved = save.run(own, shared, facts, peer_timeout_seconds=self._peer_timeout_seconds)
        if saved is not None:
            self._known_whole.add(sequence)
            self._retire(sequence)
        return saved

    def newest(self) -> tuple[Checkpoint | None, list[str]]:
        """Finds the newest whole checkpoint, having read every byte of it.

        Returns:
          It, or None if there is none; and why each newer one was passed over.

        Raises:
          CheckpointError: if the directory or a newer checkpoint cannot be read, or another version of tfdist wrote it
            in another format.
        """
        passed_over = []
        with explained("The checkpoints could not be read", self.directory):
            for sequence, path in entry.checkpoints(self.directory).items():
                try:
                    found = Checkpoint(path)
                except BrokenError as error:
                    passed_over.append(f"{path.name}: {error}")
                else:
                    self._known_whole.add(sequence)
                    return found, passed_over
        return None, passed_over

    def open(self, sequence: int) -> Checkpoint:
        """Opens one checkpoint, having read every byte of it.

        Raises:
          CheckpointError: if it is not whole; the message says what is wrong.
        """
        path = self.directory / directory_name(sequence)
        with explained(f"Checkpoint {sequence} could not be read", self.directory):
            try:
                found = Checkpoint(path)
            except BrokenError as error:
                there = ", ".join(map(str, entry.checkpoints(self.directory))) or "none"
                raise BrokenError(
                    f"Checkpoint {sequence} is not whole. Received: {error}, in {str(path)!r}. Expected: what was "
                    f"written. There are: {there}; tfdist checkpoints DIR --verify tells which of them are whole."
                ) from error
        self._known_whole.add(sequence)
        return found

    def entries(self, *, every_byte: bool = False) -> list[Entry]:
        """Returns what stands in the directory, the oldest first.

        Args:
          every_byte: whether all checksums are computed, which reads everything, or only sizes compared.

        Raises:
          CheckpointError: if the directory or a checkpoint in it cannot be read.
        """
        with explained("The checkpoints could not be read", self.directory):
            inspected = [
                entry.inspect(*item, every_byte=every_byte) for item in entry.checkpoints(self.directory).items()
            ]
            found = [
                # A training that goes on removes its older ones meanwhile.
                *(one for one in inspected if one.status != "broken" or os.path.lexists(one.path)),
                *(entry.unfinished(sequence, path) for sequence, _, path in entry.leftovers(self.directory)),
            ]
        return sorted(found, key=lambda e: (e.sequence, e.path))

    def clean(self, attempt: str | None = None) -> None:
        """Removes what earlier attempts left unfinished; what cannot be removed is logged.

        Args:
          attempt: the present one: what other ranks have already begun in it is left alone.

        Raises:
          CheckpointError: if the directory cannot be read.
        """
        with explained("The checkpoints could not be read", self.directory):
            found = entry.leftovers(self.directory)
        for _, left_by, path in found:
            if left_by != attempt:
                _try_to_remove(path, durable.remove_leftover)

    def prune(self, keep: int, *, dry_run: bool = False) -> list[Path]:
        """Removes all but the `keep` newest whole checkpoints, having read every byte of those, and what is unfinished.

        Broken ones are removed unless none is whole. Those of another format stay. Nobody may be saving meanwhile.

        Args:
          keep: at least 1.
          dry_run: whether nothing is removed.

        Returns:
          What was removed, or would be.

        Raises:
          CheckpointError: if something cannot be read, in which case nothing is removed, or cannot be removed.
          ValueError: if `keep` is less than 1.
        """
        _check_keep(keep)
        with explained("The checkpoints could not be pruned", self.directory):
            doomed: list[Path] = []
            broken: list[Path] = []
            kept = 0
            for sequence, path in entry.checkpoints(self.directory).items():
                status = entry.inspect(sequence, path, every_byte=kept < keep).status
                if status == "broken":
                    broken.append(path)
                elif status == "whole" and kept == keep:
                    doomed.append(path)
                elif status == "whole":
                    kept += 1
            doomed += broken if kept else []
            leftovers = [path for _, _, path in entry.leftovers(self.directory)]
            if not dry_run:
                for path in doomed:
                    durable.remove(path)
                for path in leftovers:
                    durable.remove_leftover(path)
        return sorted([*doomed, *leftovers])

    def _retire(self, sequence: int) -> None:
        """Removes what is older than the `keep` newest known to be whole, and what saves before `sequence` left."""
        try:
            there, leftovers = entry.checkpoints(self.directory), entry.leftovers(self.directory)
        except OSError as error:
            _log.warning("Older checkpoints could not be listed: %s", error)
            return
        kept = sorted(self._known_whole & there.keys())[-self._keep :]
        self._known_whole = set(kept)
        if len(kept) == self._keep:
            for older, path in there.items():
                if older < kept[0]:
                    _try_to_remove(path, durable.remove)
        for older, _, path in leftovers:
            if older < sequence:
                _try_to_remove(path, durable.remove_leftover)


def _try_to_remove(path: Path, remove: Callable[[Path], None]) -> None:
    try:
        remove(path)
    except OSError as error:
        _log.warning("%s could not be removed: %s", path, error)


def _check_keep(keep: int) -> None:
    if keep < 1:
        raise ValueError(f"The number of checkpoints to keep is wrong. Received: keep={keep}. Expected: at least 1.")
