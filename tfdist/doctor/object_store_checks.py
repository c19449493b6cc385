"""Checks the object store for checkpoints: it can be written and read, how fast, and two trainings exclude each other.

The checks write below the address, and remove what they have written.
"""

import contextlib
import os
import secrets
import time
from typing import TYPE_CHECKING

from tfdist.doctor.check_context import CheckContext
from tfdist.doctor.report import ERROR, OK, WARNING, Finding
from tfdist.utils.formatting import format_bytes

if TYPE_CHECKING:
    from tfdist.checkpoint.remote.remote_objects import Objects

_CHECK = "checkpoints"
_BLOCKS = 4
_PATIENCE_SECONDS = 20.0
_SLOW_BYTES_PER_SECOND = 20e6


def check_object_store(context: CheckContext) -> list[Finding]:
    """Checks that objects can be created, once, and written, read and removed, and how fast."""
    if context.object_store is None:
        return []
    # Imported late: NumPy starts threads, and `tfdist run` has to be single-threaded.
    from tfdist.checkpoint import RemoteStoreError
    from tfdist.checkpoint.remote.remote_objects import Objects, connect_store

    address = context.object_store
    try:
        objects = Objects(*connect_store(address), patience_seconds=_PATIENCE_SECONDS)
        objects.probe()
        speed = _write_speed(objects)
    except (ImportError, ValueError, RemoteStoreError) as error:
        expected = "an address below which objects can be written, read, listed and deleted"
        remedy = "Correct the address or the credentials, or install the extra: pip install 'tfdist[remote]'."
        return [Finding(ERROR, _CHECK, f"{address}: {error}", expected, remedy)]
    if not speed:
        expected = "what was written"
        return [Finding(ERROR, _CHECK, f"{address}: other bytes are read", expected, "Do not save there.")]
    found = f"{address}: {format_bytes(speed)}/s written"
    findings = [Finding(OK, _CHECK, found)]
    if speed < _SLOW_BYTES_PER_SECOND:
        seconds = context.training_state_bytes / speed
        expected = f"at least {format_bytes(_SLOW_BYTES_PER_SECOND)}/s: a checkpoint takes {seconds:.0f} s"
        findings = [Finding(WARNING, _CHECK, found, expected, f"Save less often than every {seconds:.0f} s.")]
    if not objects.connection.creates_once:
        found = f"{address}: a second creation of an object succeeds, or the library does not ask for the condition"
        expected = "a store that creates objects only if they are absent"
        remedy = "Let only one program save there: two may replace each other's checkpoints."
        findings.append(Finding(WARNING, "conditional writes", found, expected, remedy))
    return findings


def _write_speed(objects: "Objects") -> float:
    """Returns the bytes per second that are written, as a save does it; 0 if they are not read back equal."""
    from tfdist.checkpoint import RemoteStoreError
    from tfdist.checkpoint.remote.parts import BLOCK_BYTES, in_two_threads

    keys = [f"doctor/{secrets.token_hex(16)}" for _ in range(_BLOCKS)]
    block = os.urandom(BLOCK_BYTES)  # some stores compress
    try:
        began = time.monotonic()
        in_two_threads((lambda key=key: objects.put(key, block)) for key in keys)  # type: ignore[misc]
        speed = _BLOCKS * BLOCK_BYTES / max(time.monotonic() - began, 1e-9)
        return speed if objects.get(keys[0]) == block else 0.0
    finally:
        with contextlib.suppress(RemoteStoreError):
            for key in keys:
                objects.for_operation().remove(key)
