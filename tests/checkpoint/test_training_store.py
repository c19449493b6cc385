"""What every store promises: directories, own disks, memory, S3 as moto plays it, and Azure as azurite does.

Own disks of several hosts: `tests/host_storage`.
"""

import functools
import secrets

import pytest
from azure_server import azure_server
from optional_packages import require
from s3_server import s3_server

from tfdist.checkpoint import CheckpointError, SavingRanks, Shard, open_store
from tfdist.checkpoint.remote.remote_store import RemoteStore
from tfdist.host_storage.host_store import HostStore


@pytest.fixture(scope="module")
def s3():
    require("s3fs", "moto", "flask")
    with s3_server() as server:
        yield server


@pytest.fixture(scope="module")
def azure():
    with azure_server() as objects:
        yield objects


_SERVERS = [pytest.param(name, marks=pytest.mark.long) for name in ("s3", "azure")]


@pytest.fixture(params=["directory", "own disk", "memory", *_SERVERS])
def make_store(request, tmp_path):
    """Returns stores of one new place, each as another process would have it."""
    if request.param == "directory":
        return functools.partial(open_store, tmp_path / "run")
    if request.param == "own disk":
        return functools.partial(HostStore, tmp_path / "run")
    run = f"run-{secrets.token_hex(4)}"
    if request.param == "memory":
        require("fsspec")
        return functools.partial(open_store, f"memory://bucket/{run}")
    if request.param == "azure":
        objects = request.getfixturevalue("azure")(run)
        return lambda **options: RemoteStore(f"az://container/{run}", objects=objects, **options)
    objects = request.getfixturevalue("s3").objects("worker", run)
    return lambda **options: RemoteStore(f"s3://bucket/{run}", objects=objects, **options)


@pytest.fixture
def damage(make_store):
    """Changes a byte of what rank 0 has saved."""

    def change(sequence):
        store = make_store()
        if store.directory is not None:
            file = store.directory / f"ckpt-{sequence:010d}" / "rank-0.safetensors"
            file.write_bytes(_flipped(file.read_bytes()))
            return
        objects = store._objects
        key = f"parts/{sequence:010d}-a/rank-0.safetensors.00000"
        objects.put(key, _flipped(objects.get(key)))

    return change


def _flipped(content):
    return content[:-1] + bytes([content[-1] ^ 1])


def statuses(store, **options):
    return [(info.sequence, info.status) for info in store.list_checkpoints(**options)]


def test_a_new_store_is_empty(make_store):
    store = make_store()
    assert store.newest() == (None, [])
    assert store.list_checkpoints() == [] and store.prune(1) == []
    store.remove_unfinished()
    store.refresh()
    with pytest.raises(CheckpointError, match=r"Checkpoint 3 is .*: none"):
        store.open(3)


def test_what_all_ranks_saved_is_found_by_others(make_store, save, assert_complete):
    store = make_store(keep=2)
    store.lock().acquire()
    for sequence in (5, 9, 11):
        assert_complete(save(store, sequence, num_ranks=3), sequence, 3)
    store.lock().release()
    other = make_store()
    newest, skipped = other.newest()
    assert_complete(newest, 11, 3)
    assert_complete(other.open(9), 9, 3)
    assert_complete(make_store().open(11), 11, 3)
    assert skipped == [] and statuses(other) == [(9, "complete"), (11, "complete")], "5 is older than those kept"
    (info, _) = other.list_checkpoints(verify_checksums=True)
    assert (info.num_ranks, info.metadata) == (3, {"step": 900, "epoch": 9})
    assert info.path.name == "ckpt-0000000009" and info.size_bytes > 0 and info.saved_at > 0


def test_a_damaged_checkpoint_is_skipped_and_replaced(make_store, save, assert_complete, damage):
    save(make_store(), 1)
    save(make_store(), 2)
    damage(2)
    store = make_store(keep=1)
    newest, skipped = store.newest()
    assert_complete(newest, 1)
    assert len(skipped) == 1 and "rank-0.safetensors is not what was written" in skipped[0]
    assert statuses(store, verify_checksums=True) == [(1, "complete"), (2, "corrupt")]
    save(store, 2, attempt="b")
    assert_complete(make_store().newest()[0], 2)
    assert_complete(make_store().open(2), 2)
    assert statuses(store, verify_checksums=True) == [(2, "complete")]


def test_a_complete_checkpoint_is_not_replaced(make_store, save, assert_complete):
    save(make_store(), 4)
    store = make_store()
    store.newest()
    with pytest.raises(CheckpointError, match=r"A checkpoint with this number exists. Received: sequence=4"):
        save(store, 4, attempt="b")
    with pytest.raises((CheckpointError, ValueError), match=r"exists|a second time"):
        save(store, 4)
    assert_complete(make_store().newest()[0], 4)


def test_unfinished_saves_are_removed(make_store, save, assert_complete):
    hasty = make_store(peer_timeout_seconds=0.01)
    save(hasty, 1)
    save(hasty, 3, num_ranks=2, ranks=[1])
    with pytest.raises(CheckpointError, match=r"Rank 1 has not written a part of the checkpoint within 0.01 s"):
        save(hasty, 2, num_ranks=2, ranks=[0])
    assert (3, "unfinished") in statuses(hasty)
    following = make_store()
    lock = following.lock()
    lock.acquire()
    following.remove_unfinished("a")
    assert (3, "unfinished") in statuses(hasty)
    following.remove_unfinished("b")
    lock.release()
    assert statuses(make_store()) == [(1, "complete")]
    assert_complete(make_store().newest()[0], 1)


def test_pruning(make_store, save, assert_complete, damage):
    store = make_store(keep=9)
    for sequence in range(1, 5):
        save(store, sequence)
    damage(3)
    names = ["ckpt-0000000001", "ckpt-0000000003"]
    assert [path.name for path in make_store().prune(2, dry_run=True)] == names
    assert len(statuses(store)) == 4
    assert [path.name for path in make_store().prune(2)] == names
    assert statuses(make_store(), verify_checksums=True) == [(2, "complete"), (4, "complete")]


def test_the_failure_of_a_rank_ends_the_save(make_store, save):
    store, bad = make_store(peer_timeout_seconds=3600), {"rank_shard": Shard({"a": object()}), "metadata": {}}  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="A tensor of a checkpoint cannot be written"):
        store.save(1, "a", rank=1, num_ranks=2, shared_shard=None, **bad)
    with pytest.raises(CheckpointError, match="Rank 1 could not write its part .* A tensor of a checkpoint"):
        save(store, 1, num_ranks=2, ranks=[0])
    assert make_store().newest() == (None, [])


@pytest.mark.parametrize("needs_all", [False, True])
def test_a_lost_rank(make_store, shard, needs_all):
    saving = SavingRanks((1, 0), lambda: [0], needs_all=needs_all)
    parts = {"rank_shard": shard(1, 1), "shared_shard": shard(1, None), "metadata": {}}
    saved = make_store().save(1, "a", rank=1, num_ranks=2, saving=saving, **parts)
    newest, _ = make_store().newest()
    assert (saved is None) == (newest is None) == needs_all
    assert newest is None or newest.saved_ranks == (1,)


def test_the_last_owner_in_a_process_saves(make_store, save, assert_complete):
    first, second = make_store().lock(), make_store()
    first.acquire()
    assert first.is_held
    lock = second.lock()
    lock.acquire()
    lock.take_over()
    assert lock.is_held
    assert_complete(save(second, 1), 1)
    following = second.lock()
    following.acquire()
    lock.release()
    assert following.is_held and not lock.is_held, "an earlier `fit` ends later"
    assert_complete(save(second, 2), 2)
    following.release()
    assert not following.is_held
