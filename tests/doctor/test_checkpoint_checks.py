"""Checks of the directory for checkpoints."""

import errno
import shutil
from pathlib import Path

import pytest
from machines import context, one

from tfdist.doctor import checkpoint_checks as checkpoint_directory
from tfdist.doctor.checkpoint_checks import check_checkpoints, marked, sees_marker


def test_a_good_directory(tmp_path):
    for directory in (tmp_path, tmp_path / "a" / "b"):
        speed, room = check_checkpoints(context(checkpoints=directory, parameters=1000))
        assert (speed.level, room.level) == ("ok", "ok") and "written and flushed" in speed.found
        assert ("will be created in" in speed.found) == (directory != tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert check_checkpoints(context()) == []


@pytest.mark.parametrize("name", ["file/below", "file"])
def test_no_directory(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    finding = one(check_checkpoints(context(checkpoints=Path(name))))
    assert finding.level == "error" and "file is a file" in finding.found


@pytest.mark.parametrize("call", ["os.fsync", "os.rename", "tempfile.mkdtemp"])
def test_a_directory_that_cannot_be_written(tmp_path, monkeypatch, call):
    def fail(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(call, fail)
    finding = one(check_checkpoints(context(checkpoints=tmp_path)))
    assert finding.level == "error" and "No space left on device" in finding.found
    assert list(tmp_path.iterdir()) == []


def test_room_for_what_is_kept_and_one_more(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    fits, too_many = (int(free * share / (12 * 4)) for share in (0.8, 1.2))
    assert [x.level for x in check_checkpoints(context(checkpoints=tmp_path, parameters=fits))] == ["ok", "ok"]
    _, room = check_checkpoints(context(checkpoints=tmp_path, parameters=too_many))
    assert room.level == "error" and "3 kept checkpoints and the one being written" in room.expected
    _, room = check_checkpoints(context(checkpoints=tmp_path, parameters=too_many, keep=1))
    assert room.level == "ok"


def test_a_slow_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_directory, "_write_speed", lambda directory: 1e6)
    speed, _ = check_checkpoints(context(checkpoints=tmp_path))
    assert speed.level == "warning" and "a checkpoint takes 120 s" in speed.expected


def test_markers(tmp_path):
    (tmp_path / "other").mkdir()
    with marked(tmp_path / "new") as name:
        assert sees_marker(tmp_path / "newer" / "still", name)  # neither exists: both would be created below tmp_path
        assert not sees_marker(tmp_path / "other", name, timeout_seconds=0.1)
    assert not sees_marker(tmp_path, name, timeout_seconds=0.1)
    (tmp_path / "secret").touch()
    assert not sees_marker(tmp_path, "secret", timeout_seconds=0.1)
