"""Writes and removes files atomically, and flushes them to the disk."""

import contextlib
import errno
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

REMOVED_PREFIX = ".removed-"


def is_local(path: Any) -> bool:
    """Whether this is a path on a file system, and not an open file or an address (`gs://`)."""
    return isinstance(path, str | os.PathLike) and "://" not in os.fspath(path)


def flush(path: Path) -> None:
    """Forces the content of a file, or the entries of a directory, to the disk; raises an OSError if it cannot."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems have no fsync of directories and store the entries without it.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """Creates a directory and its missing parents, and flushes the new entries to the disk."""
    missing = [directory for directory in (path, *path.parents) if not directory.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for directory in missing:
        flush(directory.parent)


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[IO[bytes]]:
    """Opens a temporary file that replaces `path` when the block ends without an exception.

    Readers see the old file or the complete new one. If the block raises, the temporary file is removed. Several
    processes may replace the same path at the same time. What is `durable` is flushed to the disk before it is renamed.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     path = Path(directory, "state")
    ...     with replacing(path) as file:
    ...         _ = file.write(b"complete")
    ...     path.read_bytes(), os.listdir(directory)
    (b'complete', ['state'])
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with open(unfinished, "wb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def write(path: Path, content: bytes) -> None:
    """Creates or replaces a file with this content; see `replacing`."""
    with replacing(path) as file:
        file.write(content)


@contextlib.contextmanager
def replacing_all(path: str) -> Iterator[str]:
    """Yields a path to write to instead, and moves what is there to `path` when the block ends without an exception.

    For writers that take a path themselves. What they write may be a file, a directory, or several files whose names
    begin with that of `path`. Readers see each file as it was before or complete. Several processes may do this for the
    same path at the same time.

    >>> with tempfile.TemporaryDirectory() as directory:
    ...     with replacing_all(os.path.join(directory, "state")) as unfinished:
    ...         _ = Path(f"{unfinished}.data").write_text("values")
    ...         _ = Path(f"{unfinished}.index").write_text("names")
    ...     sorted(os.listdir(directory))
    ['state.data', 'state.index']
    """
    folder, name = os.path.split(os.path.abspath(path))
    unfinished = tempfile.mkdtemp(prefix=f".{name}.", dir=folder)
    try:
        yield os.path.join(unfinished, name)
        _move_entries(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _move_entries(source: str, target: str) -> None:
    # A file that lists others is written last, and so is moved last: directories first, then by time.
    entries = list(os.scandir(source))
    for entry in sorted(entries, key=lambda entry: (not entry.is_dir(), entry.stat().st_mtime_ns)):
        there = os.path.join(target, entry.name)
        if entry.is_dir():
            os.makedirs(there, exist_ok=True)
            _move_entries(entry.path, there)
        else:
            os.replace(entry.path, there)


def remove(path: Path) -> None:
    """Removes a file or directory: renames it first, so that a crash leaves none of it under its name."""
    removed = path.with_name(f"{REMOVED_PREFIX}{path.name}-{secrets.token_hex(4)}")
    os.rename(path, removed)
    remove_leftover(removed)


def remove_leftover(path: Path) -> None:
    """Removes a file or directory, not atomically: for unfinished and already removed ones."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
