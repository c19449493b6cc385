"""Files appear complete or not at all."""

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
