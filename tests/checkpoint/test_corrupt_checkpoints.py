"""Damaged checkpoints: the newest complete one is used, the reason for each skipped one is given, values are right."""

import dataclasses
import errno
import functools
import os
import shutil
import types
from pathlib import Path

import pytest

from tfdist.checkpoint import CheckpointError, CheckpointStore, checkpoint, manifest
from tfdist.checkpoint.manifest import Manifest

NUM_RANKS = 2
FILES = ("manifest.json", "shared.safetensors", "rank-0.safetensors", "rank-1.safetensors")
SIXTEENTHS = 16
FLIPPED_AT = 64  # positions in each file, spread evenly; the manifest's every bit is flipped in test_manifest.py


@pytest.fixture
def torn(tmp_path, save, assert_complete):
    """Tears a file of the newest of two checkpoints by `tear(path)`, and looks at what is found."""
    store = CheckpointStore(tmp_path)
    save(store, 1, num_ranks=NUM_RANKS)
    path = save(store, 2, num_ranks=NUM_RANKS).path

    def look(name, tear, reason):
        content = (path / name).read_bytes()
        tear(path / name)
        found, skipped = CheckpointStore(tmp_path).newest()
        assert_complete(found, 1, NUM_RANKS)
        assert [line.partition(": ")[0] for line in skipped] == ["ckpt-0000000002"]
        assert name in skipped[0] and reason in skipped[0], skipped
        with pytest.raises(CheckpointError, match=f"Checkpoint 2 is corrupt. Received: .*{name}"):
            CheckpointStore(tmp_path).open(2)
        statuses = [entry.status for entry in store.list_checkpoints(verify_checksums=True)]
        assert statuses == ["complete", "corrupt"]
        if (path / name).is_dir():
            (path / name).rmdir()
        (path / name).unlink(missing_ok=True)
        (path / name).write_bytes(content)
        assert_complete(CheckpointStore(tmp_path).newest()[0], 2, NUM_RANKS)  # it was this tear that was found

    return look


@pytest.mark.parametrize("name", FILES)
def test_truncated_at_every_sixteenth(torn, name):
    for sixteenth in range(SIXTEENTHS):
        reason = "checksum" if name == "manifest.json" else "bytes, not the"
        torn(name, lambda path, part=sixteenth: os.truncate(path, path.stat().st_size * part // SIXTEENTHS), reason)


@pytest.mark.parametrize("name", FILES)
def test_one_bit_flipped(torn, name):
    def flip(path: Path, position: int, bit: int) -> None:
        data = bytearray(path.read_bytes())
        data[(len(data) - 1) * position // (FLIPPED_AT - 1)] ^= 1 << bit
        path.write_bytes(data)

    for position in range(FLIPPED_AT):
        torn(name, lambda path, at=position: flip(path, at, at % 8), "is not what was written: its checksum differs")


@pytest.mark.parametrize("name", FILES)
def test_missing_longer_or_replaced(torn, name):
    size_reason = "checksum" if name == "manifest.json" else "bytes, not the"
    torn(name, lambda path: path.unlink(), "is missing")
    torn(name, lambda path: path.write_bytes(path.read_bytes() + b"\0"), size_reason)
    torn(name, lambda path: path.write_bytes(bytes(path.stat().st_size)), "checksum")
    torn(name, lambda path: (path.unlink(), path.symlink_to("nowhere")), "is missing")


def test_a_directory_in_place_of_a_file(torn):
    torn("manifest.json", lambda path: (path.unlink(), path.mkdir()), "cannot be read")


@pytest.mark.parametrize("name", FILES[1:])
def test_the_file_of_another_checkpoint(tmp_path, torn, name):
    torn(name, lambda path: shutil.copy(tmp_path / "ckpt-0000000001" / name, path), "")


def test_files_of_two_ranks_exchanged(torn):
    torn("rank-1.safetensors", lambda path: shutil.copy(path.with_name("rank-0.safetensors"), path), "")


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_manifest_that_names_other_files(tmp_path, save, assert_complete, num_ranks):
    """Of ranks that are missing, or that there should not be: its own checksum is right."""
    store = CheckpointStore(tmp_path)
    save(store, 1, num_ranks=NUM_RANKS)
    path = save(store, 2, num_ranks=NUM_RANKS).path / "manifest.json"
    path.write_bytes(dataclasses.replace(Manifest.from_bytes(path.read_bytes()), num_ranks=num_ranks).to_bytes())
    found, skipped = store.newest()
    assert_complete(found, 1, NUM_RANKS)
    assert skipped == [f"ckpt-0000000002: manifest.json does not name the files of {num_ranks} ranks"]


def test_empty_directories_and_files_under_the_name_of_a_checkpoint(tmp_path, save, assert_complete):
    store = CheckpointStore(tmp_path)
    save(store, 1)
    (tmp_path / "ckpt-0000000002").mkdir()
    (tmp_path / "ckpt-0000000003").write_text("a file")
    (tmp_path / "ckpt-0000000004").symlink_to("nowhere")
    (tmp_path / "ckpt-5").mkdir()  # not a name of the store's
    found, skipped = store.newest()
    assert_complete(found, 1)
    assert [line[:15] for line in skipped] == [f"ckpt-000000000{number}" for number in (4, 3, 2)]
    for number in (2, 3, 4):
        save(store, number, attempt="b")
        assert_complete(store.newest()[0] if number == 4 else store.open(number), number)


def test_no_checkpoint_is_complete(tmp_path, save):
    store = CheckpointStore(tmp_path)
    for sequence in (1, 2):
        save(store, sequence).path.joinpath("shared.safetensors").unlink()
    found, skipped = store.newest()
    assert found is None
    assert skipped == [f"ckpt-000000000{number}: shared.safetensors is missing" for number in (2, 1)]


@pytest.fixture
def two_checkpoints(tmp_path, save):
    store = CheckpointStore(tmp_path)
    save(store, 1)
    save(store, 2)
    return store


@pytest.fixture
def fail_reading(monkeypatch):
    """Makes reading a file of checkpoint 2 fail."""

    def make(number, name):
        def fail(path):
            if path.name == name and path.parent.name.endswith("2"):
                raise OSError(number, os.strerror(number))

        of, read = manifest.FileRecord.of, checkpoint.Path.read_bytes
        monkeypatch.setattr(manifest.FileRecord, "of", lambda path: (fail(path), of(path))[1])
        monkeypatch.setattr(checkpoint.Path, "read_bytes", lambda path: (fail(path), read(path))[1])
        stat = types.SimpleNamespace(stat=lambda path: (fail(path), os.stat(path))[1])
        monkeypatch.setattr(checkpoint, "os", stat)

    return make


@pytest.mark.parametrize("name", ["manifest.json", "rank-0.safetensors"])
def test_what_the_disk_cannot_read_is_corrupt(two_checkpoints, fail_reading, assert_complete, name):
    fail_reading(errno.EIO, name)
    store = two_checkpoints
    found, skipped = store.newest()
    assert_complete(found, 1)
    assert len(skipped) == 1 and f"ckpt-0000000002: {name} cannot be read: " in skipped[0]
    assert [entry.status for entry in store.list_checkpoints(verify_checksums=True)] == ["complete", "corrupt"]


@pytest.mark.parametrize("name", ["manifest.json", "rank-0.safetensors"])
@pytest.mark.parametrize("number", [errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EHOSTDOWN])
def test_an_unreachable_file_system_does_not_make_a_checkpoint_corrupt(
    two_checkpoints, fail_reading, save, number, name
):
    fail_reading(number, name)
    store = two_checkpoints
    listing = functools.partial(store.list_checkpoints, verify_checksums=True)
    for call in (store.newest, listing, lambda: store.open(2), lambda: store.prune(1), lambda: save(store, 2)):
        with pytest.raises(CheckpointError, match="could not be .*Received: .*Expected: .*[Ss]tart"):
            call()
    assert sorted(path.name for path in store.directory.iterdir()) == ["ckpt-0000000001", "ckpt-0000000002"]
