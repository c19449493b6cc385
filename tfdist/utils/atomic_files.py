"""Writes and removes files atomically, and flushes them to the disk."""

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO

REMOVED_PREFIX = ".removed-"


def flush(path: Path) -> None:
    """Forces the content of a file, or the entries of a directory, to the disk.

    Raises:
        OSError: If the disk or the network file system could not store them.
    """
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
    processes may replace the same path at the same time.

    Args:
        path: The file to create or replace, in an existing directory.
        durable: Whether to flush the content to the disk before the file is renamed.

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
