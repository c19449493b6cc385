"""Which process may save a training to an object store, in place of a lock."""

import contextlib
import json
import logging
import os
import secrets
import socket
import threading
from pathlib import Path
from typing import Any

from tfdist.checkpoint.directory_lock import LOCK_TIMEOUT_SECONDS
from tfdist.checkpoint.errors import CheckpointError, RemoteStoreError, SupersededError
from tfdist.checkpoint.remote.commit_log import EpochWriter, create_epoch, epoch_key, fill_gaps, newest_epoch
from tfdist.checkpoint.remote.remote_objects import Objects
from tfdist.utils.remote_requests import START_PATIENCE_SECONDS

BEAT_SECONDS = 10.0
_LEASE_BEATS = 3  # an owner that has not shown itself for so many beats is taken for dead
_RELEASED = b"released"
_POLL_SECONDS = 1.0
_MAX_RACES = 100
_log = logging.getLogger("tfdist")


class RunOwnership:
    """The right to commit, which the last process that takes it has.

    An owner that still lives, or was frozen, notices at its next commit that another one has taken over, and cannot
    commit. Forks do not inherit the right. `acquire` is for a training that begins, and does not take it from a process
    that lives; `take_over` is for one whose workers have agreed.
    """

    def __init__(self, objects: Objects, *, beat_seconds: float = BEAT_SECONDS) -> None:
        """Describes the ownership of the run below the objects' root. No thread shows it if `beat_seconds` is 0."""
        self._objects, self._beat_seconds = objects, beat_seconds
        self._writer: EpochWriter | None = None
        self._process = 0
        self._ended = threading.Event()
        self._unanswered: dict[int, bytes] = {}  # by process: whose epoch may be created, and never began

    @property
    def writer(self) -> EpochWriter | None:
        """What commits in the epoch of this object, None if it does not own the run."""
        return self._writer if self._process == os.getpid() else None

    @property
    def is_held(self) -> bool:
        """Whether this object owns the run, as far as is known."""
        return self.writer is not None and not self.writer.is_superseded

    def acquire(self, timeout_seconds: float = LOCK_TIMEOUT_SECONDS) -> None:
        """Takes the right. Waits while another process has it that shows itself, and logs that it waits.

        A process that ended without a release is waited for, too, unless it is known to have ended: for 30 s.

        Raises:
            CheckpointError: If another process had the right all the time; the message names it.
            RemoteStoreError: If the store does not answer.
        """
        objects, end, has_logged = self._prepared(), self._objects.clock() + timeout_seconds, False
        while True:
            epoch = newest_epoch(objects)
            owner = _owner_of(objects, epoch)
            if not _shows_itself(objects, epoch, owner, self._beat_seconds):
                if self._begin(objects, after=epoch):
                    return
                continue
            if objects.clock() >= end:
                raise CheckpointError(
                    f"Another process trains in this directory. Received: {_named(owner)} has owned "
                    f"{objects.root!r} for {timeout_seconds:g} s. Expected: one training at a time in a "
                    "directory. End that process, wait until it has ended, or choose another directory. A notebook "
                    "keeps the lock of an interrupted `fit` until its next one, or until its kernel is restarted."
                )
            if not has_logged:
                has_logged = True
                _log.warning("Waiting for another process that trains in %s: %s", objects.root, _named(owner))

    def take_over(self) -> None:
        """Takes the right at once.

        Raises:
            CheckpointError: If other processes take it again and again.
            RemoteStoreError: If the store does not answer.
        """
        objects = self._prepared()
        for _ in range(_MAX_RACES):
            if self._begin(objects, after=newest_epoch(objects)):
                return
        raise SupersededError(
            f"Other processes take over this training. Received: {_MAX_RACES} other owners of {objects.root!r}. "
            "Expected: one training at a time. End the others."
        )

    def release(self) -> None:
        """Gives the right back, so that the next owner does not wait. Does nothing if this object does not have it."""
        writer = self.writer
        self._ended.set()
        self._writer = None
        if writer is not None and not writer.is_superseded:
            with contextlib.suppress(RemoteStoreError):  # the next owner waits
                self._objects.for_operation(10.0).put(_beat_key(writer.epoch), _RELEASED)

    def _prepared(self) -> Objects:
        self._objects.for_operation(START_PATIENCE_SECONDS).probe()
        objects = self._objects.for_operation()
        fill_gaps(objects)
        return objects

    def _begin(self, objects: Objects, *, after: int) -> bool:
        owner = self._unanswered.get(os.getpid())
        if owner is not None and objects.get(epoch_key(after)) == owner:
            after -= 1  # else each attempt would leave an epoch that the next one has to seal
        if owner is None:  # unique: whose creation it was must be clear
            owner = json.dumps({**_this_process(), "token": secrets.token_hex(16)}).encode()
        self._unanswered = {os.getpid(): owner}
        if not create_epoch(objects, owner, after):
            return False
        self._ended.set()
        self._unanswered = {}
        self._writer, self._process, self._ended = EpochWriter(after + 1), os.getpid(), threading.Event()
        if self._beat_seconds:
            # A daemon, so that a program that fails to release it can end.
            threading.Thread(
                target=_beat,
                args=(self._objects, after + 1, self._ended, self._beat_seconds),
                name="tfdist-checkpoint-owner",
                daemon=True,
            ).start()
        return True


def _beat(objects: Objects, epoch: int, ended: threading.Event, pause_seconds: float) -> None:
    number = 0
    while not ended.wait(pause_seconds if number else 0):
        number += 1
        with contextlib.suppress(RemoteStoreError):
            objects.for_operation(pause_seconds).put(_beat_key(epoch), str(number).encode())


def _beat_key(epoch: int) -> str:
    return f"beats/{epoch:010d}"


def _owner_of(objects: Objects, epoch: int) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        return dict(json.loads((epoch and objects.get(epoch_key(epoch))) or b"{}"))
    return {}


def _shows_itself(objects: Objects, epoch: int, owner: dict[str, Any], beat_seconds: float) -> bool:
    """Returns whether the owner of an epoch lives. Watches it for a lease if that is not known otherwise."""
    if not epoch or _has_ended(owner):
        return False
    first = objects.get(_beat_key(epoch))
    end = objects.clock() + _LEASE_BEATS * beat_seconds
    beat = first
    while beat == first and beat != _RELEASED and objects.clock() < end:
        objects.sleep(_POLL_SECONDS)
        beat = objects.get(_beat_key(epoch))
    return beat not in (first, _RELEASED)


def _this_process() -> dict[str, Any]:
    here = {"host": socket.gethostname(), "pid": os.getpid(), "started": _start_of(os.getpid())}
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        here["kernel"] = f"{boot} {os.readlink('/proc/self/ns/pid')}"  # containers number processes on their own
    return here


def _has_ended(owner: dict[str, Any]) -> bool:
    """Whether a process of this host is known to have ended, or is this one, which may train again."""
    here = _this_process()
    if "kernel" not in here or owner.get("kernel") != here["kernel"]:
        return False
    is_this = (owner.get("pid"), owner.get("started")) == (here["pid"], here["started"])
    return is_this or _start_of(int(owner["pid"])) != owner.get("started")


def _start_of(pid: int) -> int | None:
    """Returns when a process was started, in ticks since the host was; None if there is none, or only a zombie."""
    try:
        state, *fields = (
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        )
    except OSError:
        return None
    return None if state in "ZX" else int(fields[18])


def _named(owner: dict[str, Any]) -> str:
    return f"process {owner['pid']} on host {owner['host']!r}" if owner.keys() >= {"pid", "host"} else "another process"
