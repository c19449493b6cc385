"""The manifest of a checkpoint: its files with sizes and checksums. It is written last, when all files are on disk."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from tfdist.checkpoint.errors import CorruptCheckpointError, OtherFormatError, file_errors
from tfdist.checkpoint.shard import Json

FORMAT = 3
# Earlier versions of tfdist would take such checkpoints for corrupt ones.
FORMAT_WITH_WORKER_FILES, FORMAT_WITH_MISSING_RANKS, FORMAT_ON_HOSTS = 4, 5, 6
MANIFEST_FILE = "manifest.json"
SHARED_FILE = "shared.safetensors"
# TensorFlow's names of the two files of a bundle of tensors, here that of a task.
_WORKER_FILE = re.compile(r"[A-Za-z0-9_]+-\d+\.(index|data-\d{5}-of-\d{5})")


def rank_file(rank: int) -> str:
    """Returns the name of a rank's file.

    >>> rank_file(3)
    'rank-3.safetensors'
    """
    return f"rank-{rank}.safetensors"


def is_worker_file(name: str) -> bool:
    """Whether a file of a checkpoint has the name of one that a worker writes.

    >>> is_worker_file("worker-3.data-00000-of-00001"), is_worker_file("rank-3.safetensors")
    (True, False)
    """
    return _WORKER_FILE.fullmatch(name) is not None


@dataclass(frozen=True)
class FileRecord:
    """Size and checksum of a file."""

    size_bytes: int
    xxh3_128: str  # the XXH3 checksum of the content as 32 hexadecimal digits, as `xxhsum -H2` computes it

    @classmethod
    def of(cls, path: Path) -> "FileRecord":
        """Computes the record of a file, which reads every byte."""
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, xxhash.xxh3_128)
            return cls(file.tell(), digest.hexdigest())

    def check(self, path: Path, *, verify_checksum: bool) -> None:
        """Compares a file with this record: its size, or its size and checksum.

        Raises:
            CorruptCheckpointError: If the file differs or is damaged.
            OSError: If this user may not read it or the file system does not respond, which does not show damage.
        """
        with file_errors(path.name):
            size = path.stat().st_size
            if size != self.size_bytes:
                raise CorruptCheckpointError(
                    f"{path.name} has {size} bytes, not the {self.size_bytes} that were written"
                )
            if verify_checksum and FileRecord.of(path) != self:
                raise CorruptCheckpointError(f"{path.name} is not what was written: its checksum differs")


@dataclass(frozen=True)
class HostFiles:
    """The files of a checkpoint on the disk of one host."""

    host: str  # its name, for messages
    files: tuple[str, ...]


@dataclass(frozen=True)
class Manifest:
    """The content of `manifest.json`.

    The names "format" and "checksum" and the computation of the checksum are the same in all formats, so that another
    format is distinguished from a damaged file.

    >>> files = {name: FileRecord(0, "") for name in (SHARED_FILE, rank_file(0))}
    >>> manifest = Manifest(7, "a", 1, 0.0, files, {"step": 700})
    >>> Manifest.from_bytes(manifest.to_bytes()) == manifest
    True
    >>> Manifest.from_bytes(manifest.to_bytes().replace(b"700", b"701"))
    Traceback (most recent call last):
    tfdist.checkpoint.errors.CorruptCheckpointError: manifest.json is not what was written: its checksum differs
    """

    # In the order of the file.
    sequence: int
    attempt: str  # which start of the program wrote it
    num_ranks: int  # each rank has a file, except the `missing_ranks`
    saved_at: float  # in seconds since 1970
    files: Mapping[str, FileRecord]  # `shared.safetensors`, each rank's file, and the files of workers
    metadata: Json  # of the writer, readable without reading tensors
    missing_ranks: tuple[int, ...] = ()  # which an elastic training had lost
    # Where each host has its own disk: who had which files when they were saved, and those in this directory.
    hosts: tuple[HostFiles, ...] = ()
    here: tuple[str, ...] = ()

    @property
    def files_here(self) -> tuple[str, ...]:
        """The names of the files that are in the directory of the manifest."""
        return self.here if self.hosts else tuple(self.files)

    @property
    def saved_ranks(self) -> tuple[int, ...]:
        """The ranks that have a file."""
        return tuple(rank for rank in range(self.num_ranks) if rank not in self.missing_ranks)

    @property
    def has_worker_files(self) -> bool:
        """Whether workers have written files in addition to those of the ranks."""
        return bool(set(self.files) - {SHARED_FILE, *map(rank_file, range(self.num_ranks))})

    def to_bytes(self) -> bytes:
        """Returns the content of the file."""
        content = asdict(self)
        missing_ranks, hosts = content.pop("missing_ranks"), content.pop("hosts")
        here = content.pop("here")
        if hosts:
            of_hosts = {"missing_ranks": missing_ranks, "hosts": hosts, "here": here}
            return _with_checksum({"format": FORMAT_ON_HOSTS, **content, **of_hosts})
        if missing_ranks:
            return _with_checksum({"format": FORMAT_WITH_MISSING_RANKS, **content, "missing_ranks": missing_ranks})
        return _with_checksum({"format": FORMAT_WITH_WORKER_FILES if self.has_worker_files else FORMAT, **content})

    @classmethod
    def from_bytes(cls, data: bytes) -> "Manifest":
        """Parses the content of the file.

        Raises:
            CorruptCheckpointError: If a single bit differs from what was written.
            OtherFormatError: If another version of tfdist wrote it.
        """
        content = _verified(data)
        if content["format"] not in (FORMAT, FORMAT_WITH_WORKER_FILES, FORMAT_WITH_MISSING_RANKS, FORMAT_ON_HOSTS):
            raise OtherFormatError(
                "The checkpoint was written by another version of tfdist. Received: format "
                f"{content['format']}. Expected: format {FORMAT} to {FORMAT_ON_HOSTS}. Use that version, or "
                "choose another directory; nothing was read or changed."
            )
        records = {name: FileRecord(**record) for name, record in content["files"].items()}
        fields = {name: content[name] for name in ("sequence", "attempt", "num_ranks", "saved_at", "metadata")}
        hosts = tuple(HostFiles(entry["host"], tuple(entry["files"])) for entry in content.get("hosts", ()))
        missing_ranks, here = tuple(content.get("missing_ranks", ())), tuple(content.get("here", ()))
        return cls(files=records, **fields, missing_ranks=missing_ranks, hosts=hosts, here=here)


def _with_checksum(content: dict[str, Any]) -> bytes:
    checksum = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return json.dumps({**content, "checksum": checksum}, indent=1).encode() + b"\n"


def _verified(data: bytes) -> dict[str, Any]:
    try:
        content = json.loads(data.decode("ascii"))
        del content["checksum"]
        # Serialized again it must be equal byte for byte, including white space.
        if _with_checksum(content) == data:
            return dict(content)
    except (ValueError, TypeError, LookupError, RecursionError):
        pass
    raise CorruptCheckpointError(f"{MANIFEST_FILE} is not what was written: its checksum differs")
