"""Kills a save before each of its operations on files, and looks what is found afterwards. Prints the outcomes as JSON.

A program of its own: it forks, which the process of the tests, with TensorFlow's threads, should not. The kill is an
`os._exit` in an audit hook, which Python calls before it opens, renames, makes or removes something.

    python tests/checkpoint/kill_everywhere.py SCENARIO DIRECTORY
"""

import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conftest import check_complete, make_save

from tfdist.checkpoint import CheckpointError, CheckpointStore
from tfdist.checkpoint import checkpoint_store as store_module

KILLED, RAISED = 99, 98
OPERATIONS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod", "os.listdir", "os.scandir")
LIMIT_SECONDS = 30


def killed_before(number: int, directory: Path, action: Callable[[], object]) -> int:
    """Runs `action` in a child that dies before its operation `number` (from 0) in `directory`; its exit code."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        signal.alarm(LIMIT_SECONDS)
        seen = 0

        def hook(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal seen
            if event not in OPERATIONS:
                return
            # Within rmtree names are relative to an open directory.
            if str(arguments[0]).startswith(str(directory)) or (event in OPERATIONS[2:5] and arguments[-1] != -1):
                if seen == number:
                    os._exit(KILLED)
                seen += 1

        sys.addaudithook(hook)
        action()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(RAISED)


def save_half(store: CheckpointStore, sequence: int, num_ranks: int, name: str) -> None:
    """Dies when `name` is half written."""
    write_direct = store_module.write_direct

    def half(path: Path, parts: Any) -> str:
        checksum = write_direct(path, parts)
        if path.name == name:
            os.truncate(path, path.stat().st_size // 2)
            os._exit(KILLED)
        return checksum

    store_module.write_direct = half
    make_save(store, sequence, num_ranks=num_ranks)


class Scenario:
    """Checkpoint 1, and what a save of number 2 finds; the save is killed, then another attempt is made."""

    num_ranks, keep = 1, 3

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.store = CheckpointStore(directory, keep=self.keep, peer_timeout_seconds=LIMIT_SECONDS)

    def prepare(self) -> None:
        make_save(self.store, 1, num_ranks=self.num_ranks, attempt="before")

    def save(self) -> None:
        make_save(self.store, 2, num_ranks=self.num_ranks)

    def afterwards(self) -> int | None:
        """The number of the newest checkpoint, which is complete; then the next attempt saves."""
        store = CheckpointStore(self.directory, keep=self.keep, peer_timeout_seconds=LIMIT_SECONDS)
        newest, skipped = store.newest()
        found = newest.sequence if newest else None
        if found is not None:
            check_complete(newest, found, self.num_ranks)
        assert skipped == [], skipped
        # A checkpoint under removal is complete or does not count.
        assert {entry.status for entry in store.list_checkpoints(verify_checksums=True)} <= {"complete", "unfinished"}
        store.remove_unfinished("after")
        make_save(store, (found or 0) + 1, num_ranks=self.num_ranks, attempt="after")
        check_complete(store.newest()[0], (found or 0) + 1, self.num_ranks)
        assert not list(self.directory.glob(".*")), list(self.directory.iterdir())
        return found


class First(Scenario):
    """There is no checkpoint before, and no directory."""

    def prepare(self) -> None:
        pass


class Retired(Scenario):
    """The save removes the checkpoint before it."""

    keep = 1


class Replaced(Scenario):
    """There is a corrupt one of the number."""

    def prepare(self) -> None:
        super().prepare()
        saved = make_save(self.store, 2, num_ranks=self.num_ranks, attempt="before")
        (saved.path / "manifest.json").write_text("{}")

    def afterwards(self) -> int | None:
        # While it exists, it is skipped.
        corrupt = self.directory / "ckpt-0000000002"
        newest, skipped = CheckpointStore(self.directory).newest()
        assert skipped == [] or (newest and newest.sequence == 1 and len(skipped) == 1)
        if skipped:
            shutil.rmtree(corrupt)
        return super().afterwards()


class ChiefOfTwo(Scenario):
    """Rank 0 is killed; rank 1 has written its part."""

    num_ranks = 2

    def prepare(self) -> None:
        super().prepare()
        make_save(self.store, 2, num_ranks=2, ranks=[1])

    def save(self) -> None:
        make_save(self.store, 2, num_ranks=2, ranks=[0])


class PeerOfTwo(Scenario):
    """Rank 1 is killed; rank 0 times out unless rank 1 had written its part."""

    num_ranks = 2

    def save(self) -> None:
        make_save(self.store, 2, num_ranks=2, ranks=[1])

    def afterwards(self) -> int | None:
        receipt = self.directory / ".unfinished-0000000002-a" / "rank-1.receipt"
        was_reported = receipt.exists()
        try:
            make_save(CheckpointStore(self.directory, peer_timeout_seconds=0), 2, num_ranks=2, ranks=[0])
        except CheckpointError as error:
            assert not was_reported and "Rank 1 has not written" in str(error), error
        else:
            assert was_reported
        return super().afterwards()


def main() -> None:
    kind, directory = {c.__name__: c for c in (First, Scenario, Retired, Replaced, ChiefOfTwo, PeerOfTwo)}, sys.argv[2]
    make = kind[sys.argv[1]]
    outcomes: list[int | None] = []
    exit_code, number = KILLED, 0
    while exit_code == KILLED:
        scenario = make(Path(directory) / str(number))
        scenario.prepare()
        exit_code = killed_before(number, scenario.directory, scenario.save)
        assert exit_code in (0, KILLED), exit_code
        outcomes.append(scenario.afterwards())
        number += 1
    for name in ("shared.safetensors", "rank-0.safetensors"):
        scenario = make(Path(directory) / name)
        if scenario.num_ranks == 1:
            scenario.prepare()
            action = lambda scenario=scenario, name=name: save_half(scenario.store, 2, 1, name)  # noqa: E731
            assert killed_before(-1, scenario.directory, action) == KILLED
            outcomes.insert(0, scenario.afterwards())
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
