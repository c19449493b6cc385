"""The errors of checkpoints, and the remedies for errors of the file system."""

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_NOT_PERMITTED = (errno.EROFS, errno.EACCES, errno.EPERM)
# The server of a network file system does not respond, or was restarted.
_UNREACHABLE = (errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENOTCONN, errno.ECONNREFUSED)


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read. The message contains the remedy."""


class CorruptCheckpointError(CheckpointError):
    """A file of a checkpoint is missing or differs from what was written."""


class OtherFormatError(CheckpointError):
    """Another version of tfdist wrote the checkpoint in another format."""


class RemoteStoreError(CheckpointError):
    """An object store did not answer, or refused, for as long as an operation waits.

    A checkpoint whose save ends with it may be committed or not; the next save settles that. Training can continue.
    """


class SupersededError(CheckpointError):
    """Another process has taken over the training, so this one can commit no more checkpoints."""


class HostError(CheckpointError):
    """Another host, on whose disk or in whose memory parts of a checkpoint are, did not answer, or cannot give them."""


def no_worker_files(location: str) -> ValueError:
    """Returns the error of a training whose workers write their own files into a checkpoint."""
    return ValueError(
        f"Checkpoints of a model on the devices of workers need a directory. Received: {location!r}. Expected: a path "
        "on a file system that all workers share, as TensorFlow writes a part on each of them. Mount the object store, "
        "or use another strategy."
    )


@contextlib.contextmanager
def explained(what: str, directory: Path, reassurance: str = "") -> Iterator[None]:
    """Turns an `OSError` within the context into a `CheckpointError` with a remedy.

    `what` failed is a sentence without its full stop, `reassurance` the last one of the message.
    """
    try:
        yield
    except OSError as error:
        message = f"{what}. Received: {error}, in {str(directory)!r}. {_remedy(error)} {reassurance}"
        raise CheckpointError(message.rstrip()) from error


@contextlib.contextmanager
def file_errors(name: str) -> Iterator[None]:
    """Turns the `OSError` of a missing or damaged file `name` into a `CorruptCheckpointError`.

    A disk that cannot read a file (EIO) has damaged it. An unreachable file system has not.

    Raises:
        CorruptCheckpointError: If the file is missing or damaged.
        OSError: If this user may not read it or the file system does not respond, which does not show damage.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise CorruptCheckpointError(f"{name} is missing") from error
    except OSError as error:
        if error.errno in _NOT_PERMITTED + _UNREACHABLE:
            raise
        raise CorruptCheckpointError(f"{name} cannot be read: {error}") from error


def _remedy(error: OSError) -> str:
    if error.errno in _DISK_FULL:
        return (
            "Expected: space for one checkpoint in addition to those that are kept. Free some space (tfdist "
            "checkpoints DIR --prune KEEP), keep fewer, or save to another disk."
        )
    if error.errno in _NOT_PERMITTED:
        return (
            "Expected: a directory in which this user may read and write. Change its permissions, mount it for "
            "writing, or choose another directory."
        )
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        return "Expected: a directory, or a path where one can be created. Choose another path."
    if error.errno in (errno.ENOENT, errno.ESTALE):
        return (
            "Expected: that no other process removes files there. Rank 0 does so when its save fails, and so does "
            "tfdist checkpoints --prune; the error of that process is the cause. If the file server was restarted, "
            "start the program again."
        )
    if error.errno in _UNREACHABLE:
        return "Expected: a file system that responds. Start again when its server does, or choose another directory."
    return "Expected: a working file system. Check it (dmesg, the log of the server), or choose another directory."
