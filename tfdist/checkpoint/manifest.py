"""The manifest: what belongs to a checkpoint. It is written last, so that it stands for the whole."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tfdist.checkpoint.errors import BrokenError, OtherFormatError
from tfdist.checkpoint.file_record import FileRecord
from tfdist.checkpoint.shard import Json

FORMAT = 2
MANIFEST = "manifest.json"
SHARED = "shared.safetensors"


def rank_file(rank: int) -> str:
    """The name of a rank's file.

    >>> rank_file(3)
    'rank-3.safetensors'
    """
    return f"rank-{rank}.safetensors"


@dataclass(frozen=True)
class Manifest:
    """What belongs to a checkpoint.

    The names "format" and "checksum", and how the checksum is made, are the same in all formats: another format can be
    told from a broken file.

    Attributes:
      sequence: the checkpoint's number.
      attempt: which start of the program wrote it.
      world: the number of ranks, each of which has a file.
      saved_at: when, in seconds since 1970.
      files: the records of `shared.safetensors` and of each rank's file.
      facts: what the writer wanted to be known without reading tensors.

    >>> manifest = Manifest(7, "a", 1, 0.0, {name: FileRecord(0, "") for name in (SHARED, rank_file(0))}, {"step": 700})
    >>> Manifest.from_bytes(manifest.to_bytes()) == manifest
    True
    >>> Manifest.from_bytes(manifest.to_bytes().replace(b"700", b"701"))
    Traceback (most recent call last):
    tfdist.checkpoint.errors.BrokenError: manifest.json is not what was written: its checksum differs
    """

    sequence: int
    attempt: str
    world: int
    saved_at: float
    files: Mapping[str, FileRecord]
    facts: Json

    def to_bytes(self) -> bytes:
        """Returns the content of the file `manifest.json`."""
        files = {name: asdict(record) for name, record in self.files.items()}
        return _with_checksum(
            {
                "format": FORMAT,
                "sequence": self.sequence,
                "attempt": self.attempt,
                "world": self.world,
                "saved_at": self.saved_at,
                "files": files,
                "facts": self.facts,
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> "Manifest":
        """Reads the content of the file `manifest.json`.

        Raises:
          BrokenError: if a single bit of it is not what was written.
          OtherFormatError: if it was written by another version of tfdist.
        """
        content = _checked(data)
        if content["format"] != FORMAT:
            raise OtherFormatError(
                "The checkpoint was written by another version of tfdist. Received: format "
                f"{content['format']}. Expected: format {FORMAT}. Use that version, or name another directory; nothing "
                "was read or changed."
            )
        records = {name: FileRecord(**record) for name, record in content["files"].items()}
        fields = {name: content[name] for name in ("sequence", "attempt", "world", "saved_at", "facts")}
        return cls(files=records, **fields)


def _with_checksum(content: dict[str, Any]) -> bytes:
    checksum = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return json.dumps({**content, "checksum": checksum}, indent=1).encode() + b"\n"


def _checked(data: bytes) -> dict[str, Any]:
    try:
        content = json.loads(data.decode("ascii"))
        del content["checksum"]
        # Written again it must be the same, byte for byte: also spaces are what was written.
        if _with_checksum(content) == data:
            return dict(content)
    except (ValueError, TypeError, LookupError, RecursionError):
        pass
    raise BrokenError(f"{MANIFEST} is not what was written: its checksum differs")
