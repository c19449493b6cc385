"""Checks of an address for checkpoints."""

import pytest
from machines import context, one
from optional_packages import require

from tfdist.doctor import object_store_checks
from tfdist.doctor.object_store_checks import check_object_store

require("fsspec")
from fsspec.implementations.memory import MemoryFileSystem  # noqa: E402

URL = "memory://bucket/doctor"


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr("tfdist.checkpoint.remote.parts.BLOCK_BYTES", 1000)
    monkeypatch.setattr(object_store_checks, "_SLOW_BYTES_PER_SECOND", 0.0)


def test_a_good_store():
    finding = one(check_object_store(context(object_store=URL)))
    assert finding.level == "ok" and finding.found.startswith(f"{URL}: ") and finding.found.endswith("/s written")
    assert not MemoryFileSystem().find("/bucket/doctor"), "nothing is left"
    assert check_object_store(context()) == []


def test_a_slow_store(monkeypatch):
    monkeypatch.setattr(object_store_checks, "_SLOW_BYTES_PER_SECOND", float("inf"))
    finding = one(check_object_store(context(object_store=URL)))
    assert finding.level == "warning" and "Save less often" in finding.remedy


def test_a_store_without_conditions(monkeypatch):
    write = MemoryFileSystem.pipe_file
    monkeypatch.setattr(MemoryFileSystem, "pipe_file", lambda *arguments, mode="": write(*arguments))
    speed, conditions = check_object_store(context(object_store=URL))
    assert (speed.level, conditions.level) == ("ok", "warning") and "only one program" in conditions.remedy


def test_a_store_that_refuses(monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Access Denied")

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", refuse)
    monkeypatch.setattr(object_store_checks, "_PATIENCE_SECONDS", 0.0)
    finding = one(check_object_store(context(object_store=URL)))
    assert finding.level == "error" and "Access Denied" in finding.found
    assert one(check_object_store(context(object_store="nowhere://a"))).level == "error"
