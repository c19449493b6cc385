"""A checkpoint torn on purpose: the newest whole one is found, what was passed over is said, no wrong value is read."""

import dataclasses
import os
import shutil
from pathlib import Path

import pytest

from tfdist.checkpoint import CheckpointError, CheckpointStore
from tfdist.checkpoint.manifest import Manifest

WORLD = 2
FILES = ("manifest.json", "shared.safetensors", "rank-0.safetensors", "rank-1.safetensors")
SIXTEENTHS = 16
FLIPPED_AT = 64  # positions in each file, spread evenly; the manifest's every bit is flipped in test_manifest.py


@pytest.fixture
def torn(tmp_path, save, whole):
    """Tears a file of the newest of two checkpoints by `tear(path)`, and looks at what is found."""
    store = CheckpointStore(tmp_path)
    save(store, 1, world=WORLD)
    path = save(store, 2, world=WORLD).path

    def look(name, tear, reason):
        whole_file = (path / name).read_bytes()
        tear(path / name)
        found, passed_over = CheckpointStore(tmp_path).newest()
        whole(found, 1, WORLD)
        assert [line.partition(": ")[0] for line in passed_over] == ["ckpt-0000000002"]
        assert name in passed_over[0] and reason in passed_over[0], passed_over
        with pytest.raises(CheckpointError, match=f"Checkpoint 2 is not whole. Received: .*{name}"):
            CheckpointStore(tmp_path).open(2)
        statuses = [entry.status for entry in store.entries(every_byte=True)]
        assert statuses == ["whole", "broken"]
        if (path / name).is_dir():
            (path / name).rmdir()
        (path / name).unlink(missing_ok=True)
        (path / name).write_bytes(whole_file)
        whole(CheckpointStore(tmp_path).newest()[0], 2, WORLD)  # it was this tear that was found

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


@pytest.mark.parametrize("world", [1, 3])
def test_a_manifest_that_names_other_files(tmp_path, save, whole, world):
    """Of ranks that are missing, or that there should not be: its own checksum is right."""
    store = CheckpointStore(tmp_path)
    save(store, 1, world=WORLD)
    path = save(store, 2, world=WORLD).path / "manifest.json"
    path.write_bytes(dataclasses.replace(Manifest.from_bytes(path.read_bytes()), world=world).to_bytes())
    found, passed_over = store.newest()
    whole(found, 1, WORLD)
    assert passed_over == [f"ckpt-0000000002: manifest.json does not name the files of {world} ranks"]


def test_empty_directories_and_files_under_the_name_of_a_checkpoint(tmp_path, save, whole):
    store = CheckpointStore(tmp_path)
    save(store, 1)
    (tmp_path / "ckpt-0000000002").mkdir()
    (tmp_path / "ckpt-0000000003").write_text("a file")
    (tmp_path / "ckpt-0000000004").symlink_to("nowhere")
    (tmp_path / "ckpt-5").mkdir()  # not a name of the store's
    found, passed_over = store.newest()
    whole(found, 1)
    assert [line[:15] for line in passed_over] == [f"ckpt-000000000{number}" for number in (4, 3, 2)]
    for number in (2, 3, 4):
        save(store, number, attempt="b")
        whole(store.newest()[0] if number == 4 else store.open(number), number)


def test_nothing_is_whole(tmp_path, save):
    store = CheckpointStore(tmp_path)
    for sequence in (1, 2):
        save(store, sequence).path.joinpath("shared.safetensors").unlink()
    found, passed_over = store.newest()
    assert found is None
    assert passed_over == [f"ckpt-000000000{number}: shared.safetensors is missing" for number in (2, 1)]
