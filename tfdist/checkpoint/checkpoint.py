"""A checkpoint that is on the disk and whole."""

import os
from pathlib import Path

from tfdist.checkpoint import container
from tfdist.checkpoint.errors import BrokenError, reading
from tfdist.checkpoint.manifest import MANIFEST, SHARED, Manifest, rank_file
from tfdist.checkpoint.shard import Json, Shard

PREFIX = "ckpt-"


def directory_name(sequence: int) -> str:
    """The name of a checkpoint's directory.

    >>> directory_name(7)
    'ckpt-0000000007'
    """
    return f"{PREFIX}{sequence:010d}"


class Checkpoint:
    """A checkpoint that is whole.

    Attributes:
      path: its directory.
      sequence: its number.
      world: the number of ranks that wrote it.
      facts: what the writer wanted to be known of it without reading tensors.
      saved_at: when, in seconds since 1970.
      size_bytes: the size of its files, without the manifest.
    """

    def __init__(self, path: Path, *, every_byte: bool = True) -> None:
        """Opens a checkpoint.

        Args:
          path: its directory.
          every_byte: whether all checksums are computed, or only sizes compared.

        Raises:
          BrokenError: if it is not whole; the message says what is wrong, without its path.
          OtherFormatError: if another version of tfdist wrote it, in another format.
          OSError: if this user may not read it, or the file system does not answer.
        """
        self.path = path
        self._manifest = _read_manifest(path)
        self.sequence = self._manifest.sequence
        self.world = self._manifest.world
        self.facts: Json = self._manifest.facts
        self.saved_at = self._manifest.saved_at
        self.size_bytes = sum(record.size_bytes for record in self._manifest.files.values())
        if path.name != directory_name(self.sequence):
            raise BrokenError(f"{MANIFEST} is that of checkpoint {self.sequence}")
        if set(self._manifest.files) != {SHARED, *map(rank_file, range(self.world))}:
            raise BrokenError(f"{MANIFEST} does not name the files of {self.world} ranks")
        self._verified: dict[str, tuple[int, ...]] = {}
        for name in self._manifest.files:
            self._check(name, every_byte=every_byte)

    def shared(self) -> Shard:
        """Reads what is equal on all ranks.

        Raises:
          BrokenError: if the file has changed since this checkpoint was opened, and is not whole any more.
        """
        return self._read(SHARED)

    def of_rank(self, rank: int) -> Shard:
        """Reads what one rank saved.

        Raises:
          ValueError: if there was no such rank.
          BrokenError: as in `shared`.
        """
        if not 0 <= rank < self.world:
            raise ValueError(
                f"Checkpoint {self.sequence} has no such rank. Received: {rank}. Expected: 0 to {self.world - 1}, the "
                "ranks that wrote it."
            )
        return self._read(rank_file(rank))

    def _read(self, name: str) -> Shard:
        if not (found := _fingerprint(self.path / name)) or self._verified.get(name) != found:
            self._check(name, every_byte=True)
        return container.read(self.path / name)

    def _check(self, name: str, *, every_byte: bool) -> None:
        fingerprint = _fingerprint(self.path / name)
        self._manifest.files[name].check(self.path / name, every_byte=every_byte)
        if every_byte:
            self._verified[name] = fingerprint


def _fingerprint(path: Path) -> tuple[int, ...]:
    """What changes when a file is written to; empty if there is none, or none that can be looked at."""
    try:
        found = os.stat(path)
    except OSError:  # whoever reads it says why
        return ()
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _read_manifest(path: Path) -> Manifest:
    with reading(MANIFEST):
        content = (path / MANIFEST).read_bytes()
    return Manifest.from_bytes(content)
