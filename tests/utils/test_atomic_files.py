"""Files appear complete or not at all."""

import os
from pathlib import Path

import pytest

from tfdist.utils import atomic_files


def test_file_is_replaced_when_the_block_ends(tmp_path):
    path = tmp_path / "state"
    path.write_bytes(b"old")
    with atomic_files.replacing(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert [file.name for file in tmp_path.iterdir()] == ["state"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_failed_block_leaves_the_old_file_and_nothing_else(tmp_path, error):
    path = tmp_path / "state"
    path.write_bytes(b"old")
    with pytest.raises(error), atomic_files.replacing(path) as file:
        file.write(b"new")
        raise error
    assert path.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["state"]


def test_two_writers_of_one_file_do_not_mix(tmp_path):
    path = tmp_path / "state"
    with atomic_files.replacing(path) as first, atomic_files.replacing(path) as second:
        first.write(b"first")
        second.write(b"second, and longer")
    assert path.read_bytes() == b"first"
    assert [file.name for file in tmp_path.iterdir()] == ["state"]


def _export(path, text):
    os.makedirs(os.path.join(path, "variables"), exist_ok=True)
    for name in ("model", "variables/values"):
        Path(path, name).write_text(text)


def test_directories_of_two_writers_are_merged_and_other_files_stay(tmp_path):
    path = str(tmp_path / "exported")
    _export(path, "old")
    (tmp_path / "exported" / "notes").write_text("kept")
    with atomic_files.replacing_all(path) as first, atomic_files.replacing_all(path) as second:
        _export(second, "second")
        _export(first, "first")
        assert (tmp_path / "exported" / "model").read_text() == "old"
    found = {file.name: file.read_text() for file in tmp_path.rglob("*") if file.is_file()}
    assert found == {"model": "first", "values": "first", "notes": "kept"}
    assert [file.name for file in tmp_path.iterdir()] == ["exported"]


def test_failed_writer_of_a_path_changes_nothing(tmp_path):
    path = str(tmp_path / "state")
    with pytest.raises(OSError, match="full"), atomic_files.replacing_all(path) as unfinished:
        Path(f"{unfinished}.data").write_text("a part")
        raise OSError("full")
    assert list(tmp_path.iterdir()) == []


def test_the_file_that_lists_others_is_replaced_last(tmp_path, monkeypatch):
    path = str(tmp_path / "state")
    replaced, replace = [], os.replace
    monkeypatch.setattr(atomic_files.os, "replace", lambda one, other: (replaced.append(other), replace(one, other)))
    with atomic_files.replacing_all(path) as unfinished:
        _export(unfinished, "values")
        for number, name in enumerate(("b", "c", "a")):
            Path(unfinished, name).touch()
            os.utime(os.path.join(unfinished, name), (number + 1, number + 1))
        os.utime(os.path.join(unfinished, "model"), (4, 4))
        os.utime(os.path.join(unfinished, "variables"), (5, 5))
    assert [os.path.relpath(each, path) for each in replaced] == ["variables/values", "b", "c", "a", "model"]
