"""What a manifest says of a file: its size and checksum.

The checksum is to find what disks, networks and torn writes do, at the price of little more than reading the file. It
is no protection against those who may write to the directory.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import xxhash

from tfdist.checkpoint.errors import BrokenError, reading


@dataclass(frozen=True)
class FileRecord:
    """A file's size and checksum.

    Attributes:
      size_bytes: its size.
      xxh3_128: the XXH3 of its content, as 32 hexadecimal digits; `xxhsum -H2` computes the same.
    """

    size_bytes: int
    xxh3_128: str

    @classmethod
    def of(cls, path: Path) -> "FileRecord":
        """Reads every byte of a file."""
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, xxhash.xxh3_128)
            return cls(file.tell(), digest.hexdigest())

    def check(self, path: Path, *, every_byte: bool) -> None:
        """Compares a file with this record: its size alone, or every byte of it.

        Raises:
          BrokenError: if it differs or cannot be read.
          OSError: if this user may not read it, or the file system does not answer, which says nothing about the file.
        """
        with reading(path.name):
            size = path.stat().st_size
            if size != self.size_bytes:
                raise BrokenError(f"{path.name} has {size} bytes, not the {self.size_bytes} that were written")
            if every_byte and FileRecord.of(path) != self:
                raise BrokenError(f"{path.name} is not what was written: its checksum differs")
