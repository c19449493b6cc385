"""Whether checkpoints can be kept in a directory: written, flushed, enough room, and the same directory for all tasks.

What is tried is tried below a temporary directory in it, or in its nearest parent while it does not exist; nothing is
left behind.
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

from tfdist.doctor.finding import ERROR, OK, WARNING, Finding
from tfdist.doctor.situation import Situation
from tfdist.doctor.units import format_bytes, format_count

_CHECK = "checkpoints"
_PREFIX = ".tfdist-doctor-"
_MARKER = re.compile(re.escape(_PREFIX) + "[0-9a-f]{32}")
_BLOCK = 2**20
_MOST_BYTES = 128 * _BLOCK
_WRITE_SECONDS = 1.0
_SLOW_BYTES_PER_SECOND = 20e6
_LOOK_SECONDS = 5.0  # network file systems remember for seconds that a name was not there


def check_checkpoints(situation: Situation) -> list[Finding]:
    """Whether the directory can be written, how fast, and whether it has room for the checkpoints that are kept."""
    if situation.checkpoints is None:
        return []
    directory = situation.checkpoints
    if "://" in str(directory) or re.match(r"[a-z0-9]+:/[^/]", str(directory)):
        remedy = "Mount the bucket as a file system, or save to a disk and copy from there."
        return [Finding(ERROR, _CHECK, f"{directory} is a URL", "a directory of a mounted file system", remedy)]
    place = _existing(directory)
    if not place.is_dir():
        return [Finding(ERROR, _CHECK, f"{place} is a file", "a directory", "Choose another directory.")]
    try:
        speed = _write_speed(place)
        status = os.statvfs(place)
    except OSError as error:
        expected = "a directory in which this user may make, write and flush files"
        remedy = "Correct its owner and mode, mount it writable, make room, or choose another directory."
        return [Finding(ERROR, _CHECK, f"{place}: {error.strerror or error}", expected, remedy)]
    found = f"{directory}: " if place == directory else f"{directory} is to be made in {place}: "
    found += f"{format_bytes(speed)}/s written and flushed"
    findings = [_room(situation, place, status.f_frsize * status.f_bavail)]
    if speed < _SLOW_BYTES_PER_SECOND:
        seconds = situation.training_state_bytes / speed
        remedy = f"Save more rarely than every {seconds:.0f} s, or to a faster disk that all workers share."
        expected = f"at least {format_bytes(_SLOW_BYTES_PER_SECOND)}/s: a checkpoint would take {seconds:.0f} s"
        return [Finding(WARNING, _CHECK, found, expected, remedy), *findings]
    return [Finding(OK, _CHECK, found), *findings]


def _room(situation: Situation, place: Path, free: int) -> Finding:
    # While the newest is written, all that are kept are still there.
    need = (situation.keep + 1) * situation.training_state_bytes
    each = (
        f"{format_bytes(situation.training_state_bytes)} each ({format_count(situation.parameters)} parameters, Adam)"
    )
    expected = f"{format_bytes(need)} for {situation.keep} checkpoints and the one that is being written, {each}"
    if free >= need:
        return Finding(OK, "checkpoint room", f"{format_bytes(free)} free; to be kept: {expected}")
    remedy = "Make room, keep fewer (FailureRecovery(keep=...), --keep here), or choose another file system."
    return Finding(ERROR, "checkpoint room", f"{format_bytes(free)} free below {place}", expected, remedy)


@contextlib.contextmanager
def marked(directory: Path) -> Iterator[str]:
    """Leaves a marker where the checkpoints will be, and yields its name.

    Raises:
        OSError: If it cannot be made.
    """
    marker = _existing(directory) / f"{_PREFIX}{secrets.token_hex(16)}"
    marker.touch(exist_ok=False)
    try:
        yield marker.name
    finally:
        with contextlib.suppress(OSError):
            marker.unlink()


def sees_marker(directory: Path, name: str, limit_seconds: float = _LOOK_SECONDS) -> bool:
    """Whether another task's marker is here too, after `limit_seconds` at the latest.

    >>> sees_marker(Path("/"), "../etc/passwd")
    False
    """
    if not _MARKER.fullmatch(name):
        return False
    place, end = _existing(directory), time.monotonic() + limit_seconds
    while True:
        with contextlib.suppress(OSError):
            if name in os.listdir(place):  # reads the directory anew, where a look at the name may be remembered
                return True
        if time.monotonic() >= end:
            return False
        time.sleep(0.1)


def _existing(directory: Path) -> Path:
    directory = Path(os.path.abspath(directory))
    return next(path for path in (directory, *directory.parents) if os.path.lexists(path))


def _write_speed(place: Path) -> float:
    """Returns the bytes a second that are written and flushed in a new directory below `place`."""
    below = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
    try:
        block = os.urandom(_BLOCK)  # some file systems compress
        written, began = 0, time.monotonic()
        with open(below / "trial", "wb", buffering=0) as file:
            while written < _MOST_BYTES and time.monotonic() < began + _WRITE_SECONDS:
                written += file.write(block)
            os.fsync(file.fileno())
        os.rename(below / "trial", below / "renamed")
        return written / max(time.monotonic() - began, 1e-9)
    finally:
        shutil.rmtree(below, ignore_errors=True)
