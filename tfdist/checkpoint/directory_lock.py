"""A lock on the directory of a store: only one process at a time trains there."""

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import struct
import threading
import time
from pathlib import Path

from tfdist.checkpoint.errors import CheckpointError
from tfdist.utils import atomic_files

LOCK_FILE = ".lock"
# A file server keeps the lock of a process killed on another host for its lease, 90 s by default.
LOCK_TIMEOUT_SECONDS = 100.0
_PAUSE_SECONDS = 0.2
_LOCKED_BY_OTHER = (errno.EAGAIN, errno.EACCES)
_LOCKS_UNSUPPORTED = (errno.EROFS, errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)
_WHOLE_FILE = struct.pack("hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)  # Linux' `struct flock`
_log = logging.getLogger("tfdist")

# The lock excludes every other descriptor of the file, also in this process. So a process has one descriptor per file.
_guard = threading.Lock()
_held: dict[tuple[int, int], tuple[int, "DirectoryLock"]] = {}  # by device and inode: the descriptor and its owner


def _release_in_fork() -> None:
    """Closes the parent's descriptors in a forked process, so that the locks end with the parent."""
    global _guard
    _guard = threading.Lock()  # a thread that does not exist in this process may hold the old one
    for descriptor, _ in _held.values():
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_release_in_fork)


class DirectoryLock:
    """A lock on a file in a directory. It ends with the process, however that ends; forks do not inherit it.

    It never blocks within one process: the last object that acquires it holds it, because a training may follow one
    that was interrupted. If the file system has no locks or is not writable, nothing is locked.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     lock = DirectoryLock(directory)
    ...     lock.acquire()
    ...     lock.is_held
    True
    >>> lock.release()
    >>> lock.is_held
    False
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        """Describes the lock on `directory`, which `acquire` creates if it is missing."""
        self._directory = Path(directory)

    @property
    def is_held(self) -> bool:
        """Whether this object holds the lock."""
        return any(owner is self for _, owner in _held.values())

    def acquire(self, timeout_seconds: float = LOCK_TIMEOUT_SECONDS) -> None:
        """Locks the directory. Waits while another process holds the lock, and logs that it waits.

        Raises:
            CheckpointError: If another process held the lock all the time; the message names it.
        """
        end = time.monotonic() + timeout_seconds
        has_logged = False
        while not self._try_acquire():
            if time.monotonic() >= end:
                raise CheckpointError(
                    f"Another process trains in this directory. Received: {self._holder()} has held the lock of "
                    f"{str(self._directory)!r} for {timeout_seconds:g} s. Expected: one training at a time in a "
                    "directory. End that process, wait until it has ended, or choose another directory. A notebook "
                    "keeps the lock of an interrupted `fit` until its next one, or until its kernel is restarted."
                )
            if not has_logged:
                has_logged = True
                _log.warning("Waiting for another process that trains in %s: %s", self._directory, self._holder())
            time.sleep(_PAUSE_SECONDS)

    def take_over(self) -> None:
        """Locks the directory for a worker on which the others have agreed, unless another process holds the lock."""
        with contextlib.suppress(CheckpointError):  # an earlier chief may be frozen, and hold it until it ends
            self.acquire(0)

    def release(self) -> None:
        """Releases the lock. Does nothing if this object does not hold it."""
        with _guard:
            for key in [key for key, (_, owner) in _held.items() if owner is self]:
                os.close(_held.pop(key)[0])

    def _try_acquire(self) -> bool:
        """Returns whether there is nothing to wait for: the directory is locked, or cannot be locked."""
        with _guard:
            try:
                atomic_files.make_directory(self._directory)
                if (key := self._file_key()) in _held:  # must not be opened a second time
                    _held[key] = _held[key][0], self
                    return True
                descriptor = os.open(self._directory / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o666)
            except OSError as error:
                self._log_unlocked(error)
                return True
            try:
                _lock(descriptor)
            except OSError as error:
                os.close(descriptor)
                if error.errno in _LOCKED_BY_OTHER:
                    return False
                self._log_unlocked(error)
                return True
            with contextlib.suppress(OSError):  # the lock counts even if the holder cannot be written
                _write_holder(descriptor)
            status = os.fstat(descriptor)
            _held[status.st_dev, status.st_ino] = descriptor, self
            return True

    def _file_key(self) -> tuple[int, int]:
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(self._directory / LOCK_FILE)
            return status.st_dev, status.st_ino
        return -1, -1

    def _log_unlocked(self, error: OSError) -> None:
        if error.errno in _LOCKS_UNSUPPORTED:
            _log.debug("%s is not locked: %s", self._directory, error)
        else:
            _log.warning("No lock prevents another process from training in %s: %s", self._directory, error)

    def _holder(self) -> str:
        try:
            holder = json.loads((self._directory / LOCK_FILE).read_bytes())
            return f"process {holder['pid']} on host {holder['host']!r}"
        except (OSError, ValueError, LookupError, TypeError):
            return "an unknown process"


def _lock(descriptor: int) -> None:
    """Locks an open file; raises `OSError` if another process holds the lock or locks are not supported."""
    try:
        # This lock belongs to the descriptor. A POSIX record lock ends when the process closes any other descriptor of
        # the file, as code that copies the directory does.
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _WHOLE_FILE)
    except (AttributeError, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _write_holder(descriptor: int) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode(), 0)
