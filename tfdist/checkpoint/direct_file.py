"""Writes new files directly from memory to the disk, without the page cache, and computes their checksums."""

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Iterable
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

FileWriter = Callable[[Path, Iterable[npt.NDArray[Any]]], str]  # as `write_direct`
_BLOCK_BYTES = 4096  # a multiple of the blocks of almost all disks; with others the page cache is used
_STAGING_BYTES = 1 << 20  # small enough for the cache of a core
# Buffers of earlier writes. A process that forks shares them with its child, which needs its own.
_spare: list[npt.NDArray[np.uint8]] = []
os.register_at_fork(after_in_child=_spare.clear)


def write_direct(path: Path, parts: Iterable[npt.NDArray[Any]], *, overwrite: bool = False) -> str:
    r"""Writes the bytes of `parts` to a new file and flushes it to the disk. Other threads run meanwhile.

    The page cache would cost a core several times as much: new pages, which are filled, written, and freed when the
    file is removed. File systems without direct access, and the end of the file, use it.

    Args:
        path: The file.
        parts: C-contiguous arrays, which follow each other in the file.
        overwrite: Whether the file may exist. Then it is written to again, which takes no new memory or blocks.

    Returns:
        The XXH3 checksum as 32 hexadecimal digits. It is that of the memory, so it also detects an error of the write.

    Raises:
        FileExistsError: If the file exists and shall not be overwritten.
        OSError: If the file cannot be written.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     checksum = write_direct(Path(directory, "file"), [np.arange(3, dtype=np.uint8)])
    ...     Path(directory, "file").read_bytes(), checksum == xxhash.xxh3_128(bytes([0, 1, 2])).hexdigest()
    (b'\x00\x01\x02', True)
    """
    checksum = xxhash.xxh3_128()
    staging, filled = _take_buffer(), 0
    with open(path, "r+b" if overwrite and path.exists() else "xb", buffering=0) as file:
        _set_direct(file, True)
        for part in parts:
            source = part.reshape(-1).view(np.uint8)
            while source.size:
                count = min(source.size, staging.size - filled)
                staging[filled : filled + count] = source[:count]
                source, filled = source[count:], filled + count
                if filled == staging.size:
                    checksum.update(staging.data)
                    _write(file, staging)
                    filled = 0
        checksum.update(staging[:filled].data)
        blocks = filled // _BLOCK_BYTES * _BLOCK_BYTES
        _write(file, staging[:blocks])
        _set_direct(file, False)
        _write(file, staging[blocks:filled])
        file.truncate()
        os.fsync(file.fileno())
    _spare.append(staging)
    return checksum.hexdigest()


def _take_buffer() -> npt.NDArray[np.uint8]:
    try:
        return _spare.pop()
    except IndexError:
        # Shared memory: a process that forks during a direct write from its own could change what is written.
        return np.frombuffer(mmap.mmap(-1, _STAGING_BYTES), np.uint8)


def _write(file: FileIO, content: npt.NDArray[np.uint8]) -> None:
    while content.size:
        try:
            content = content[file.write(content.data) :]
        except OSError as error:
            # Direct access wants other blocks, or is at no multiple of a block after an incomplete write.
            if error.errno != errno.EINVAL or not _is_direct(file):
                raise
            _set_direct(file, False)


def _is_direct(file: FileIO) -> bool:
    return bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT)


def _set_direct(file: FileIO, direct: bool) -> None:
    """Sets whether writes bypass the page cache, if the file system can."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    with contextlib.suppress(OSError):
        fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT)
