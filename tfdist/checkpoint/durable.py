"""Files and directories that are on the disk, and not only in a cache, when a function returns."""

import errno
import os
import secrets
import shutil
from pathlib import Path

REMOVED_PREFIX = ".removed-"


def flush(path: Path) -> None:
    """Forces a file's content, or a directory's entries, to the disk.

    Raises:
      OSError: if the disk or the network file system could not keep what was written.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems know no fsync of a directory: they keep its entries without.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """Makes a directory and its parents, if they are not there."""
    made = [directory for directory in (path, *path.parents) if not directory.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for directory in made:
        flush(directory.parent)


def write(path: Path, content: bytes) -> None:
    """Writes a file that is never seen in part: under a temporary name first, flushed, then renamed."""
    part = path.with_name(f".{path.name}.part")
    with open(part, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.rename(part, path)


def remove(path: Path) -> None:
    """Removes a directory or file at once under its name; what a crash leaves of it has another name."""
    removed = path.with_name(f"{REMOVED_PREFIX}{path.name}-{secrets.token_hex(4)}")
    os.rename(path, removed)
    remove_leftover(removed)


def remove_leftover(path: Path) -> None:
    """Removes a directory or file; not at once, so for what does not count anyway."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
