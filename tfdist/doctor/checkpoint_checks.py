"""Checks the directory for checkpoints: it can be written, has enough room, and is the same for all tasks.

The checks write below a temporary directory in it, or in its nearest existing parent, and remove everything.
"""

import contextlib
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tfdist.doctor.check_context import CheckContext
from tfdist.doctor.report import ERROR, OK, WARNING, Finding
from tfdist.utils.formatting import format_bytes, format_count

_CHECK = "checkpoints"
_PREFIX = ".tfdist-doctor-"
_MARKER = re.compile(re.escape(_PREFIX) + "[0-9a-f]{32}")
_BLOCK_BYTES = 2**20
_MAX_WRITE_BYTES = 128 * _BLOCK_BYTES
_MAX_WRITE_SECONDS = 1.0
_SLOW_BYTES_PER_SECOND = 20e6
_MARKER_SECONDS = 5.0  # network file systems cache for seconds that a name does not exist


def check_checkpoints(context: CheckContext) -> list[Finding]:
    """Checks that the directory can be written, how fast, and that it has room for the checkpoints that are kept."""
    if context.checkpoints is None:
        return []
    directory = context.checkpoints
    existing = _existing(directory)
    if not existing.is_dir():
        return [Finding(ERROR, _CHECK, f"{existing} is a file", "a directory", "Choose another directory.")]
    try:
        speed = _write_speed(existing)
        status = os.statvfs(existing)
    except OSError as error:
        expected = "a directory in which this user may create, write and flush files"
        remedy = "Correct its owner and mode, mount it writable, free space, or choose another directory."
        return [Finding(ERROR, _CHECK, f"{existing}: {error.strerror or error}", expected, remedy)]
    found = f"{directory}: " if existing == directory else f"{directory} will be created in {existing}: "
    found += f"{format_bytes(speed)}/s written and flushed"
    room = _room(context, existing, status.f_frsize * status.f_bavail)
    if speed < _SLOW_BYTES_PER_SECOND:
        seconds = context.training_state_bytes / speed
        expected = f"at least {format_bytes(_SLOW_BYTES_PER_SECOND)}/s: a checkpoint takes {seconds:.0f} s"
        remedy = f"Save less often than every {seconds:.0f} s, or to a faster disk that all workers share."
        return [Finding(WARNING, _CHECK, found, expected, remedy), room]
    return [Finding(OK, _CHECK, found), room]


def _room(context: CheckContext, directory: Path, free: int) -> Finding:
    # During a save all kept checkpoints still exist.
    need = (context.keep + 1) * context.training_state_bytes
    checkpoint_size = (
        f"{format_bytes(context.training_state_bytes)} each ({format_count(context.parameters)} parameters, Adam)"
    )
    expected = f"{format_bytes(need)} for {context.keep} kept checkpoints and the one being written, {checkpoint_size}"
    if free >= need:
        return Finding(OK, "checkpoint room", f"{format_bytes(free)} free; needed: {expected}")
    remedy = "Free space, keep fewer (FailureRecovery(keep=...), --keep here), or choose another file system."
    return Finding(ERROR, "checkpoint room", f"{format_bytes(free)} free below {directory}", expected, remedy)


@contextlib.contextmanager
def marked(directory: Path) -> Iterator[str]:
    """Creates a marker where the checkpoints will be, yields its name, and removes it; or raises an OSError."""
    marker = _existing(directory) / f"{_PREFIX}{secrets.token_hex(16)}"
    marker.touch(exist_ok=False)
    try:
        yield marker.name
    finally:
        with contextlib.suppress(OSError):
            marker.unlink()


def sees_marker(directory: Path, name: str, timeout_seconds: float = _MARKER_SECONDS) -> bool:
    """Returns whether another task's marker exists here; waits for it at most `timeout_seconds`.

    >>> sees_marker(Path("/"), "../etc/passwd")
    False
    """
    if not _MARKER.fullmatch(name):
        return False
    existing, deadline = _existing(directory), time.monotonic() + timeout_seconds
    while True:
        with contextlib.suppress(OSError):
            if name in os.listdir(existing):  # reads the directory; `exists` may return a cached answer
                return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.1)


def _existing(directory: Path) -> Path:
    """Returns the directory, or its nearest existing parent."""
    directory = Path(os.path.abspath(directory))
    return next(path for path in (directory, *directory.parents) if os.path.lexists(path))


def _write_speed(directory: Path) -> float:
    """Returns the bytes per second that are written and flushed in a new directory below `directory`."""
    below = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=directory))
    try:
        block = os.urandom(_BLOCK_BYTES)  # some file systems compress
        written, began = 0, time.monotonic()
        with open(below / "trial", "wb", buffering=0) as file:
            while written < _MAX_WRITE_BYTES and time.monotonic() < began + _MAX_WRITE_SECONDS:
                written += file.write(block)
            os.fsync(file.fileno())
        os.rename(below / "trial", below / "renamed")
        return written / max(time.monotonic() - began, 1e-9)
    finally:
        shutil.rmtree(below, ignore_errors=True)
