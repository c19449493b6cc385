"""Checkpoints on own disks survive lost, empty and exchanged hosts, torn writers and writers of earlier attempts."""

import dataclasses
import errno
import logging
import shutil
import threading

import pytest
from simulated_hosts import LIMIT_SECONDS, Messages, Training, assert_is, in_threads

from tfdist.checkpoint import CheckpointError, HostError, OtherFormatError, Shard, manifest
from tfdist.checkpoint.manifest import Manifest, rank_file
from tfdist.host_storage import host_save, peer_files
from tfdist.host_storage import hosts as hosts_module
from tfdist.host_storage.host_save import HostSave
from tfdist.host_storage.host_store import HostStore
from tfdist.host_storage.inventory import inventory_of, newest_of
from tfdist.host_storage.meeting_of_hosts import Place
from tfdist.transport.blocking_connection import BlockingConnection


@pytest.fixture
def started():
    trainings = []
    yield trainings
    for training in trainings:
        training.end()


@pytest.fixture
def train(started):
    """Starts a training after the end of the one before."""

    def start(directories, attempt="a", **options):
        for training in started:
            training.end()
        started.append(Training(directories, attempt, **options))
        return started[-1]

    return start


@pytest.fixture
def hosts(tmp_path):
    """The disks of three hosts."""
    return [tmp_path / name for name in "abc"]


def names_in(directory, sequence=1):
    return sorted(path.name for path in (directory / f"ckpt-{sequence:010d}").iterdir())


def test_each_host_has_its_parts_and_those_of_the_host_before_it(hosts, train, monkeypatch):
    monkeypatch.setattr(hosts_module, "_SMALL_BYTES", 100)  # otherwise all hosts have all parts
    a, b, c = hosts
    training = train([a, a, b, c])
    saved = training.save(1)
    common = ["manifest.json", "shared.safetensors"]
    own = {a: [0, 1, 3], b: [0, 1, 2], c: [2, 3]}
    for directory, ranks in own.items():
        assert names_in(directory) == sorted([*common, *(f"rank-{rank}.safetensors" for rank in ranks)])
        assert [path.name for path in directory.iterdir() if path.name.startswith(".host")] == []
    assert_is(saved, 1, "a", 4)
    assert HostStore(b).list_checkpoints(verify_checksums=True)[0].status == "complete"


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_host_loses_its_disk(hosts, train, lost, caplog):
    train(hosts, keep=1).save(1)
    train(hosts, keep=1).save(2)
    shutil.rmtree(hosts[lost])
    training = train(hosts, "b", keep=1)
    with caplog.at_level(logging.WARNING, "tfdist"):
        for checkpoint in training.restore():
            assert_is(checkpoint, 2, "a", 3)
    name = "abc"[lost]
    had = f"host {name!r} (worker {lost}) had no "
    told = [record.message for record in caplog.records if had in record.message]
    assert told[0].startswith(f"FailureRecovery: {had}shared.safetensors") and "taken them from host" in told[0]
    assert len(names_in(hosts[lost], 2)) == 5, "all files, as they were read"
    training.save(3)
    shutil.rmtree(hosts[(lost + 1) % 3])
    assert_is(train(hosts, "c", keep=1).restore()[0], 3, "b", 3)


def test_hosts_come_back_in_another_order_and_with_other_workers(hosts, train):
    train([hosts[0], hosts[0], hosts[1], hosts[2]]).save(1)
    for order in ([2, 0, 1, 1], [1, 2, 0], [2, 1], [1, 1, 1, 2, 0]):
        training = train([hosts[host] for host in order], "b")
        for checkpoint in training.restore():
            assert_is(checkpoint, 1, "a", 4)
    training.save(2)
    assert_is(train([hosts[1], hosts[0]], "c").restore()[1], 2, "b", 5)


def test_a_host_that_does_not_come_back_is_replaced_by_copies(hosts, train):
    train(hosts).save(1)
    for left in ([0, 1], [1, 2], [2, 0]):
        assert_is(train([hosts[host] for host in left], "b").restore()[0], 1, "a", 3)


def test_all_but_one_host_are_lost(hosts, train):
    """Small parts are on all hosts."""
    train(hosts).save(1)
    for left in hosts:
        assert_is(train([left], "b").restore()[0], 1, "a", 3)


def test_what_copies_do_not_have_is_named_and_an_older_checkpoint_taken(hosts, train, monkeypatch):
    monkeypatch.setattr(hosts_module, "_SMALL_BYTES", 100)
    train([hosts[0]] * 3).save(1)
    train(hosts, "b").save(2)
    training = train([hosts[0]], "c")  # without the part of rank 1
    assert_is(training.restore()[0], 1, "a", 3)
    assert training.skipped == [
        "ckpt-0000000002: rank-1.safetensors is on none of the hosts that are here; it was saved on 'b' and 'c'"
    ]
    assert_is(training.save(2), 2, "c", 1)  # in place of what cannot be restored
    assert_is(train([hosts[0]], "d").restore()[0], 2, "c", 1)


def test_damage_on_one_host_is_repaired_from_another(hosts, train):
    train(hosts[:2]).save(1)
    file = hosts[1] / "ckpt-0000000001" / "rank-1.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert_is(train(hosts[:2], "b").restore()[1], 1, "a", 2)
    assert file.read_bytes() == content
    for directory in hosts[:2]:
        (directory / "ckpt-0000000001" / "rank-1.safetensors").write_bytes(content[:-1])
    training = train(hosts[:2], "c")
    assert training.restore() == [None, None]
    (reason,) = training.skipped
    assert "rank-1.safetensors has" in reason and "on host 'a'" in reason and "on host 'b'" in reason


class _Killed(BaseException):
    pass


@pytest.mark.parametrize("dies", ["before its part is sent", "before its manifest", "before the decision"])
def test_a_writer_that_is_killed_loses_nothing(hosts, train, dies, monkeypatch):
    """A checkpoint is committed when one host has its manifest: then all files were on the disks."""
    train(hosts[:2]).save(1)
    training = train(hosts[:2], "b", peer_timeout_seconds=0.5)
    send, commit = peer_files.PeerFiles.send, host_save.commit
    killed = threading.Event()

    def die(*_):
        killed.set()
        raise _Killed

    if dies == "before its part is sent":
        monkeypatch.setattr(
            peer_files.PeerFiles,
            "send",
            lambda files, *more: die() if files is training.stores[1]._meeting.files else send(files, *more),
        )
    elif dies == "before its manifest":
        monkeypatch.setattr(
            host_save, "commit", lambda directory, *more: die() if directory == hosts[1] else commit(directory, *more)
        )
    else:
        monkeypatch.setattr(host_save.HostSave, "_collect", die)
    # A killed process cleans up nothing, and tells nobody.
    monkeypatch.setattr(host_save.shutil, "rmtree", lambda *_, **__: None)
    tell_all = host_save.HostSave._send_to_all
    monkeypatch.setattr(
        host_save.HostSave, "_send_to_all", lambda save, decision: None if killed.is_set() else tell_all(save, decision)
    )
    with pytest.raises((_Killed, CheckpointError)):
        training.save(2)
    monkeypatch.undo()
    assert killed.is_set()
    training = train(hosts[:2], "c")
    expected = (2, "b") if dies == "before its manifest" else (1, "a")
    for checkpoint in training.restore():
        assert_is(checkpoint, *expected, 2)
    for directory in hosts[:2]:
        assert not list(directory.glob(".unfinished-*"))
    training.save(3)
    assert_is(train(hosts[:2], "d").restore()[0], 3, "c", 2)


def test_of_two_attempts_that_saved_one_number_the_later_one_counts(hosts, train):
    a, b, c = hosts
    train([a, b]).save(1)
    shutil.copytree(a, c)  # a host that was cut off, and is back
    shutil.rmtree(a)
    train([b, a], "b").save(1)
    training = train([c, b, a], "c")
    for checkpoint in training.restore():
        assert_is(checkpoint, 1, "b", 2)
    assert Manifest.from_bytes((c / "ckpt-0000000001" / "manifest.json").read_bytes()).attempt == "b"


def test_what_a_disk_that_all_shared_had_is_on_own_disks(hosts, train, monkeypatch):
    monkeypatch.setattr(hosts_module, "_SMALL_BYTES", 100)
    train([hosts[0]] * 3).save(1)
    restored = train(hosts, "b").restore()
    for directory in hosts:
        assert HostStore(directory).list_checkpoints(verify_checksums=True)[0].status == "complete"
    assert "rank-0.safetensors" not in names_in(hosts[2])
    for checkpoint in restored:
        assert_is(checkpoint, 1, "a", 3)


def test_another_format_is_an_error_only_if_it_is_newer(hosts, train, monkeypatch):
    training = train(hosts[:2])
    with monkeypatch.context() as patched:
        patched.setattr(manifest, "FORMAT_ON_HOSTS", 7)
        training.save(1)
    with pytest.raises(OtherFormatError, match="Received: format 7"):
        train(hosts[:2], "b").restore()
    shutil.copytree(hosts[0] / "ckpt-0000000001", hosts[0] / "ckpt-0000000000")
    train(hosts[:2], "c").save(2)
    assert_is(train(hosts[:2], "d").restore()[0], 2, "c", 2)


def test_files_that_a_worker_could_not_know_to_be_saved_stay(hosts, train, monkeypatch):
    """The chief ends after its decision, before this worker has it."""
    training = train(hosts[:2], peer_timeout_seconds=0.3)
    with monkeypatch.context() as patched:
        patched.setattr(HostSave, "_send_to_all", lambda save, decision: None)
        with pytest.raises(HostError, match=r"A host did not answer. Received: nothing from worker 1 of host 'b'"):
            training.save(1)
    assert list(hosts[1].glob(".unfinished-*/*.safetensors"))
    for checkpoint in train(hosts[:2], "b").restore():
        assert_is(checkpoint, 1, "a", 2)


def test_files_of_an_earlier_attempts_writer_are_refused(hosts, train):
    earlier = train(hosts[:2])
    meeting = earlier.stores[0]._meeting
    later = train(hosts[:2], "b")
    meeting = dataclasses.replace(meeting, addresses=later.stores[0]._meeting.addresses)
    with pytest.raises(HostError, match="A copy of rank-0.safetensors could not be sent to host 'b'.*cluster"):
        HostSave(hosts[0], 1, "a", meeting).run(Shard({}), Shard({}), {})
    assert later.save(1).sequence == 1


def test_workers_that_do_not_have_equal_values_are_named(hosts, train, caplog):
    training = train(hosts)
    with caplog.at_level(logging.WARNING, "tfdist"):
        training.save(1, differs=[1])
    assert "other bytes from host 'b' (worker 1) in checkpoint 1" in caplog.text
    assert "shared.safetensors" not in names_in(hosts[1])
    for checkpoint in train(hosts, "b").restore():
        assert_is(checkpoint, 1, "a", 3)


def test_each_host_keeps_as_many_as_asked(hosts, train):
    training = train(hosts[:2], keep=2)
    for sequence in range(1, 5):
        training.save(sequence)
    training = train(hosts[:2], "b", keep=2)
    training.restore()
    for sequence in range(5, 8):
        training.save(sequence)
    for directory in hosts[:2]:
        assert [info.sequence for info in HostStore(directory).list_checkpoints()] == [6, 7]


def test_a_failure_on_one_host_ends_the_save_on_all(hosts, train):
    training = train(hosts[:2])
    (hosts[1] / ".unfinished-0000000001-a").write_text("no directory")
    with pytest.raises(CheckpointError, match="sent to host 'b' .worker 1.. Received: FileExistsError"):
        training.save(1)
    assert not list(hosts[0].glob(".unfinished-*"))
    training.save(2)
    training.attempt = "a2"
    with pytest.raises(CheckpointError, match="A checkpoint with this number exists. Received: sequence=2"):
        training.save(2)


def test_a_worker_that_does_not_answer_is_named(hosts):
    store = HostStore(hosts[0], peer_timeout_seconds=0.1)
    with pytest.raises(HostError, match="Worker 1 has not answered within 0.1 s.*same arguments on all workers"):
        store.meet(Messages(0, 2, {}, threading.Condition()), Place("a", "127.0.0.1", 0), "disk")


class _LockedDirectory:
    def acquire(self):
        raise CheckpointError("Another process trains in this directory.")

    def release(self):
        pass


def test_a_locked_directory_is_named(hosts, monkeypatch):
    monkeypatch.setattr(HostStore, "lock", lambda store: _LockedDirectory())
    with pytest.raises(HostError, match=r"Another process trains .* This is what host 'b' \(worker 1\) found"):
        Training(hosts[:2])


def test_an_address_is_refused():
    with pytest.raises(ValueError, match="All workers share an object store. Received: .*'s3://b', shared=False"):
        HostStore("s3://b")


def test_a_host_that_cannot_store_what_it_fetches_says_why(hosts, train, monkeypatch):
    """Its other workers know of it, so nothing is tried again."""
    workers = [hosts[0], hosts[1], hosts[1]]
    train(workers).save(1)
    training = train(workers, "b")
    training.stores[0].newest()

    def fail(store, *_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(HostStore, "_complete", fail)

    def error_of(rank):
        with pytest.raises(HostError, match="could not be restored. Received: .*No space left.*Free some space"):
            training.stores[rank].open(1)

    in_threads(error_of, [1, 2])


def test_all_hosts_verify_at_once(hosts, train):
    train(hosts).save(1)
    inventories = {host: inventory_of(directory) for host, directory in enumerate(hosts)}
    all_read = threading.Barrier(3)

    def check(host, saved, records):
        all_read.wait(LIMIT_SECONDS)
        return {rank_file(1): "damaged"} if host == 1 else {}

    found, _ = newest_of(inventories, str, check)
    assert found.holders[rank_file(0)] == [0, 1, 2] and found.holders[rank_file(1)] == [0, 2]


def test_a_slow_disk_has_time_to_flush_a_copy(hosts, train, monkeypatch):
    receive, limits = BlockingConnection.receive, []

    def record(connection, timeout_seconds):
        limits.append(timeout_seconds)
        return receive(connection, timeout_seconds)

    training = train(hosts[:2], peer_timeout_seconds=777.0)
    monkeypatch.setattr(BlockingConnection, "receive", record)
    training.save(1)
    assert limits.count(777.0) == 2


def test_a_number_is_free_again_when_the_directories_were_removed(hosts, train):
    training = train(hosts[:2])
    training.save(1)
    for directory in hosts[:2]:
        shutil.rmtree(directory)
    training.attempt = "b"
    assert_is(training.save(1), 1, "b", 2)
