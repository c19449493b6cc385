"""Files that are written directly from memory: their content and checksum, with and without direct access."""

import errno
import fcntl
import os

import numpy as np
import pytest

from tfdist.checkpoint import direct_file
from tfdist.checkpoint.direct_file import write_direct
from tfdist.checkpoint.manifest import FileRecord

BLOCK, STAGING = direct_file._BLOCK_BYTES, direct_file._STAGING_BYTES


def parts_of(*sizes):
    generator = np.random.default_rng(0)
    return [generator.integers(0, 256, size, np.uint8) for size in sizes]


def check(path, parts):
    checksum = write_direct(path, parts)
    assert path.read_bytes() == b"".join(part.tobytes() for part in parts)
    assert checksum == FileRecord.of(path).xxh3_128


@pytest.mark.parametrize(
    "sizes",
    [
        (),
        (1,),
        (0, BLOCK, 0),
        (BLOCK - 1, 2),
        (STAGING,),
        (8, STAGING),
        (7, 2 * STAGING + BLOCK, 3, 3 * STAGING - 10),
    ],
    ids=str,
)
def test_the_file_is_what_was_given(tmp_path, sizes):
    check(tmp_path / "file", parts_of(*sizes))


def test_arrays_of_all_shapes_and_dtypes(tmp_path):
    check(
        tmp_path / "file",
        [np.float64(3).reshape(()), np.ones((2, 0), np.int16), np.arange(6.0).reshape(2, 3), np.array([True])],
    )


def test_blocks_are_written_past_the_page_cache(tmp_path, monkeypatch):
    modes, write = [], direct_file._write

    def note(file, content):
        if content.size:
            modes.append((bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT), content.size))
        write(file, content)

    monkeypatch.setattr(direct_file, "_write", note)
    with open(tmp_path / "probe", "wb") as probe:
        direct_file._set_direct(probe, True)
        has_direct_access = direct_file._is_direct(probe)
    check(tmp_path / "file", parts_of(STAGING + BLOCK + 5))
    assert modes == [(has_direct_access, STAGING), (has_direct_access, BLOCK), (False, 5)]


@pytest.mark.parametrize("refused", ["the flag", "the write", "the rest of an incomplete write"])
def test_file_systems_without_direct_access(tmp_path, monkeypatch, refused):
    """Some refuse the flag, some the write; a write that is interrupted ends within a block."""
    is_direct = []

    class File:
        def __init__(self, file):
            self._file = file

        def __getattr__(self, name):
            return getattr(self._file, name)

        def write(self, content):
            if is_direct and refused == "the write":
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            if is_direct and refused == "the rest of an incomplete write":
                if self._file.tell() % BLOCK:
                    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
                return self._file.write(content[:1000])
            return self._file.write(content)

    def note(file, direct):
        if refused != "the flag":
            is_direct[:] = [True] if direct else []

    write = direct_file._write
    monkeypatch.setattr(direct_file, "_set_direct", note)
    monkeypatch.setattr(direct_file, "_is_direct", lambda file: bool(is_direct))
    monkeypatch.setattr(direct_file, "_write", lambda file, content: write(File(file), content))
    check(tmp_path / "file", parts_of(STAGING + 3 * BLOCK + 5))


def test_other_errors_are_raised(tmp_path, monkeypatch):
    def full(file, content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(direct_file, "_write", full)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)) as caught:
        write_direct(tmp_path / "file", parts_of(10))
    assert caught.value.errno == errno.ENOSPC


def test_a_file_is_never_replaced(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileExistsError):
        write_direct(tmp_path / "file", parts_of(3))
    assert (tmp_path / "file").read_text() == "mine"
