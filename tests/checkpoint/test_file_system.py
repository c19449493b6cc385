"""Full and read-only disks, directories of other users: errors contain the remedy, earlier checkpoints stay intact.

Each program runs on a small disk: a tmpfs in a mount namespace that ends with the program.
"""

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]
DISK_BYTES = 2 * 1024 * 1024
PRELUDE = """
import os, shutil, subprocess, sys
from types import SimpleNamespace
import numpy as np
from conftest import check_complete, make_save, make_shard
from tfdist.checkpoint import CheckpointError, CheckpointStore, Shard
os.umask(0o022)
store = CheckpointStore("disk/store")

def save(sequence, size_bytes, attempt="a"):
    own = Shard({"a": np.zeros(size_bytes, np.uint8)})
    return store.save(sequence, attempt, rank=0, num_ranks=1, rank_shard=own, shared_shard=Shard({}), metadata={})

def fails(call, *messages):
    try:
        call()
    except CheckpointError as error:
        assert all(message in str(error) for message in messages), error
        return
    raise AssertionError("no error")
"""


@pytest.fixture(scope="module")
def namespace() -> list[str]:
    """The command before one that may mount."""
    try:
        subprocess.run(
            [*NAMESPACE, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, check=True, timeout=30
        )
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no file system can be mounted here: {getattr(error, 'stderr', b'').decode() or error}")
    return NAMESPACE


@pytest.fixture
def on_small_disk(tmp_path, namespace):
    """Runs a program whose `disk` is a tmpfs of 2 MiB."""

    def run(program: str, size: int = DISK_BYTES) -> None:
        (tmp_path / "disk").mkdir(exist_ok=True)
        (tmp_path / "program.py").write_text(PRELUDE + textwrap.dedent(program))
        shell = f'mount -t tmpfs -o size={size} none disk && exec "$0" program.py'
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{HERE}"}
        command = [*namespace, "sh", "-c", shell, sys.executable]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert not list((tmp_path / "disk").iterdir())

    return run


def test_room_is_looked_for_before_anything_is_written(on_small_disk):
    on_small_disk("""
        make_save(store, 1)
        before = os.listdir("disk/store")
        free = shutil.disk_usage("disk").free
        fails(lambda: save(2, free), "Not enough disk space for checkpoint 2. Received: ", f"{free:,} bytes free",
              "Expected: at least ", "Earlier checkpoints are intact", "--prune")
        assert os.listdir("disk/store") == before
        check_complete(store.newest()[0], 1)
        save(3, free // 2)
        assert store.newest()[0].sequence == 3
    """)


def test_a_disk_that_fills_up_meanwhile(on_small_disk):
    on_small_disk("""
        make_save(store, 1)
        usage = shutil.disk_usage
        shutil.disk_usage = lambda path: SimpleNamespace(free=2**40)  # as if there was room when it was looked for
        free = usage("disk").free
        fails(lambda: save(2, 3 * 2**20), "Checkpoint 2 could not be written", "No space left on device",
              "Free some space", "Earlier checkpoints are intact.")
        assert usage("disk").free == free, "what was written of it is still there"
        assert [entry.status for entry in store.list_checkpoints()] == ["complete"]
        check_complete(store.newest()[0], 1)
        save(3, 2**20)
        assert store.newest()[0].sequence == 3
    """)


def test_a_disk_with_room_for_any_part_of_a_save(on_small_disk):
    """Whatever is the first thing for which there is no room: the old or the new checkpoint is there."""
    on_small_disk(
        """
        usage = shutil.disk_usage
        shutil.disk_usage = lambda path: SimpleNamespace(free=2**40)
        make_save(store, 1)
        free = usage("disk").free
        page = 4096
        outcomes = []
        for pages in range(free // page + 1):
            with open("disk/filler", "wb") as filler:
                filler.write(bytes(page * (free // page - pages)))
            room = usage("disk").free
            try:
                make_save(store, 2)
            except CheckpointError as error:
                assert "No space left on device" in str(error) and "Free some space" in str(error), error
            found, skipped = store.newest()
            assert skipped == []
            check_complete(found, found.sequence)
            outcomes.append(found.sequence)
            if found.sequence == 2:
                break
            assert usage("disk").free == room, "what was written of it is still there"
        assert outcomes[-1] == 2 and 3 <= len(outcomes) <= 8, outcomes
        """,
        size=64 * 1024,
    )


def test_a_read_only_disk(on_small_disk):
    on_small_disk("""
        make_save(store, 1)
        make_save(store, 2, num_ranks=2, ranks=[1])
        subprocess.run(["mount", "-o", "remount,ro", "disk"], check=True)
        store = CheckpointStore("disk/store")
        check_complete(store.newest()[0], 1)
        assert [entry.status for entry in store.list_checkpoints(verify_checksums=True)] == ["complete", "unfinished"]
        fails(lambda: make_save(store, 3), "Checkpoint 3 could not be written. Received: ", "Read-only file system",
              "mount it for writing, or choose another directory. Earlier checkpoints are intact.")
        fails(lambda: make_save(CheckpointStore("disk/new"), 1), "Read-only file system", "choose another directory")
        fails(lambda: store.prune(1), "The checkpoints could not be pruned", "Read-only file system")
        store.remove_unfinished()  # logs
        check_complete(store.newest()[0], 1)
    """)


def test_a_disk_that_becomes_read_only_after_the_save(on_small_disk):
    """The checkpoint is there; that older ones could not be removed is logged."""
    on_small_disk("""
        from tfdist.utils import atomic_files
        store = CheckpointStore("disk/store", keep=1)
        make_save(store, 1)
        remove = atomic_files.remove
        def refused(path):
            subprocess.run(["mount", "-o", "remount,ro", "disk"], check=True)
            remove(path)
        atomic_files.remove = refused
        check_complete(make_save(store, 2), 2)
        assert [entry.sequence for entry in store.list_checkpoints()] == [1, 2]
    """)


AS_NOBODY = "os.setgroups([]), os.setgid(65534), os.setuid(65534)"


@pytest.fixture
def as_nobody(tmp_path):
    """Runs a program as a user who owns nothing."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")

    def run(program: str, *arguments: str) -> None:
        os.chmod(tmp_path, 0o755)
        # The modules are imported before: nobody may not be able to read this checkout.
        (tmp_path / "program.py").write_text(PRELUDE + textwrap.dedent(program).replace("AS_NOBODY", AS_NOBODY))
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{HERE}"}
        command = [sys.executable, "program.py", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr

    return run


def test_a_directory_of_somebody_else(as_nobody):
    as_nobody("""
        make_save(store, 1)
        for directory, folders, files in os.walk("disk"):
            os.chmod(directory, 0o555)
        here = os.open(".", os.O_RDONLY)
        AS_NOBODY
        os.chdir(here)
        check_complete(store.newest()[0], 1)
        fails(lambda: make_save(store, 2), "Checkpoint 2 could not be written", "Permission denied",
              "Change its permissions")
        check_complete(store.newest()[0], 1)
    """)


@pytest.mark.parametrize("name", ["manifest.json", "shared.safetensors", "."])
def test_what_may_not_be_read_is_not_taken_for_corrupt(as_nobody, name):
    program = """
        make_save(store, 1)
        newest = make_save(store, 2)
        os.chmod(newest.path / sys.argv[1], 0)
        here = os.open(".", os.O_RDONLY)
        AS_NOBODY
        os.chdir(here)
        entries = lambda: store.list_checkpoints(verify_checksums=True)
        for call in (store.newest, lambda: store.open(2), entries, lambda: store.prune(1)):
            fails(call, "Permission denied", "ckpt-0000000002", "Change its permissions")
        check_complete(store.open(1), 1)
    """
    as_nobody(program, name)


def test_a_file_where_the_directory_should_be(tmp_path):
    from tfdist.checkpoint import CheckpointError, CheckpointStore, Shard

    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "store"):
        store = CheckpointStore(path)
        with pytest.raises(CheckpointError, match=r"could not be written. .* Expected: a directory"):
            store.save(1, "a", rank=0, num_ranks=1, rank_shard=Shard({}), shared_shard=Shard({}), metadata={})
        for call in (store.newest, store.list_checkpoints, store.remove_unfinished):
            with pytest.raises(CheckpointError, match=r"could not be read. .* Expected: a directory"):
                call()
    assert (tmp_path / "file").read_text() == "mine"


def test_a_directory_that_vanishes_during_the_save(tmp_path, save, assert_complete, monkeypatch):
    from tfdist.checkpoint import CheckpointError, CheckpointStore, sharded_save

    store = CheckpointStore(tmp_path / "store")
    save(store, 1)
    collect = sharded_save.collect_receipts

    def remove(directory, ranks, **options):
        shutil.rmtree(directory)
        return collect(directory, [1], **options)

    monkeypatch.setattr(sharded_save, "collect_receipts", remove)
    with pytest.raises(CheckpointError, match="Expected: that no other process removes files there"):
        save(store, 2)
    assert_complete(store.newest()[0], 1)
