"""The errors of checkpoints, and what to do about those of the file system."""

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT)
_REFUSED = (errno.EROFS, errno.EACCES, errno.EPERM)
# The server of a network file system does not answer, or has been mounted anew.
_AWAY = (errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENOTCONN, errno.ECONNREFUSED)


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the message says what to do."""


class BrokenError(CheckpointError):
    """A checkpoint is not whole: something is missing, or is not what was written."""


class OtherFormatError(CheckpointError):
    """A checkpoint was written by another version of tfdist."""


@contextlib.contextmanager
def explained(what: str, directory: Path, reassurance: str = "") -> Iterator[None]:
    """Turns an `OSError` within into a `CheckpointError` that says what to do.

    Args:
      what: what could not be done, as a sentence without its full stop.
      directory: the store's.
      reassurance: what is said at the end.
    """
    try:
        yield
    except OSError as error:
        message = f"{what}. Received: {error}, in {str(directory)!r}. {_remedy(error)} {reassurance}"
        raise CheckpointError(message.rstrip()) from error


def _remedy(error: OSError) -> str:
    if error.errno in _FULL:
        return (
            "Expected: room for one more checkpoint beside those that are kept. Free some space there (tfdist "
            "checkpoints DIR --prune KEEP), keep fewer, or save to another disk."
        )
    if error.errno in _REFUSED:
        return (
            "Expected: a directory in which this user may read and write. Change its permissions, mount it for "
            "writing, or name another directory."
        )
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        return "Expected: a directory, or a path where one can be made. Name another one."
    if error.errno in (errno.ENOENT, errno.ESTALE):
        return (
            "Expected: that nobody else removes files there. Rank 0 does when it gives a save up, and tfdist "
            "checkpoints --prune does; the error of whoever removed them is the cause. If it was the server that was "
            "started anew, start the program again."
        )
    if error.errno in _AWAY:
        return "Expected: a file system that answers. Start again when its server does, or name another directory."
    return (
        "Expected: a file system that works. Look at its health (dmesg, the server's log), or name another directory."
    )


@contextlib.contextmanager
def reading(name: str) -> Iterator[None]:
    """Tells of a file `name` that is missing or damaged by a BrokenError.

    A disk that cannot read a file (EIO) has damaged it. A file system that is away has not.

    Raises:
      BrokenError: as above.
      OSError: if this user may not read it, or the file system does not answer, which says nothing about the file.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise BrokenError(f"{name} is missing") from error
    except OSError as error:
        if error.errno in _REFUSED + _AWAY:
            raise
        raise BrokenError(f"{name} cannot be read: {error}") from error
