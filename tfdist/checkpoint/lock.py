"""A lock on a store's directory: one process at a time saves there."""

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

from tfdist.checkpoint import durable
from tfdist.checkpoint.errors import CheckpointError

LOCK_FILE = ".lock"
# A process that was killed on another host keeps its lock of a network file system for a lease, 90 s by default.
PATIENCE_SECONDS = 100.0
_PAUSE_SECONDS = 0.2
_HELD = (errno.EAGAIN, errno.EACCES)
_WITHOUT_LOCKS = (errno.EROFS, errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)
_WHOLE_FILE = struct.pack("hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)  # Linux' `struct flock`
_log = logging.getLogger("tfdist")

# A lock keeps out whoever opens the file a second time, this process, too. So there is one descriptor a file.
_guard = threading.Lock()
_held: dict[tuple[int, int], tuple[int, "DirectoryLock"]] = {}  # by device and inode: the descriptor, and whose it is


def _leave_to_parent() -> None:
    """In a fork: its parent's locks are its parent's, and end with that."""
    global _guard
    _guard = threading.Lock()  # a thread that is not in this process may have it
    for descriptor, _ in _held.values():
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


class DirectoryLock:
    """A lock on a file in a directory: it ends with the process, however that ends, and its forks do not have it.

    Within one process it never blocks: the last one that acquires it has it, as a training may follow one there that
    was interrupted. Where the file system knows no locks, or nothing can be written, nothing is locked.

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
        """Describes the lock on `directory`, which is made when it is acquired."""
        self._directory = Path(directory)

    @property
    def is_held(self) -> bool:
        """Whether it is locked by this object."""
        return any(owner is self for _, owner in _held.values())

    def acquire(self, patience_seconds: float = PATIENCE_SECONDS) -> None:
        """Locks the directory; waits for another process that holds it, and says so in the log.

        Args:
          patience_seconds: how long, as the holder may be one that is ending.

        Raises:
          CheckpointError: another process has held it for all that time; the message names it.
        """
        end = time.monotonic() + patience_seconds
        has_told = False
        while not self._try():
            if time.monotonic() >= end:
                raise CheckpointError(
                    f"Another process trains in this directory. Received: {self._holder()} has held the lock of "
                    f"{str(self._directory)!r} for {patience_seconds:g} s. Expected: one training at a time in a "
                    "directory. End that process, wait until it has ended, or name another directory. A notebook "
                    "keeps the lock of an interrupted `fit` until its next one, or until its kernel is restarted."
                )
            if not has_told:
                has_told = True
                _log.warning("Waiting for another process that trains in %s: %s", self._directory, self._holder())
            time.sleep(_PAUSE_SECONDS)

    def release(self) -> None:
        """Lets others have it; does nothing if this object does not have it."""
        with _guard:
            for key in [key for key, (_, owner) in _held.items() if owner is self]:
                os.close(_held.pop(key)[0])

    def _try(self) -> bool:
        """Whether there is nothing to wait for: it is locked, or cannot be."""
        with _guard:
            try:
                durable.make_directory(self._directory)
                if (key := self._find()) in _held:  # not to be opened a second time
                    _held[key] = _held[key][0], self
                    return True
                descriptor = os.open(self._directory / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o666)
            except OSError as error:
                self._tell(error)
                return True
            try:
                _lock(descriptor)
            except OSError as error:
                os.close(descriptor)
                if error.errno in _HELD:
                    return False
                self._tell(error)
                return True
            with contextlib.suppress(OSError):  # it is locked, whether that can be said or not
                _say_who(descriptor)
            status = os.fstat(descriptor)
            _held[status.st_dev, status.st_ino] = descriptor, self
            return True

    def _find(self) -> tuple[int, int]:
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(self._directory / LOCK_FILE)
            return status.st_dev, status.st_ino
        return -1, -1

    def _tell(self, error: OSError) -> None:
        if error.errno in _WITHOUT_LOCKS:
            _log.debug("%s is not locked: %s", self._directory, error)
        else:
            _log.warning("Nothing keeps another process from training in %s, too: %s", self._directory, error)

    def _holder(self) -> str:
        try:
            told = json.loads((self._directory / LOCK_FILE).read_bytes())
            return f"process {told['pid']} on host {told['host']!r}"
        except (OSError, ValueError, LookupError, TypeError):
            return "a process that has not said who it is"


def _lock(descriptor: int) -> None:
    """Locks an open file; raises `OSError` if another process has it, or it cannot be locked."""
    try:
        # It belongs to the descriptor. A POSIX record lock is gone when the process closes any other of the same file,
        # as one that copies the directory does.
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _WHOLE_FILE)
    except (AttributeError, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _say_who(descriptor: int) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode(), 0)
