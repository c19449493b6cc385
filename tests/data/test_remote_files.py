"""Files at URLs give the rows of files on paths; what was replaced, is missing or does not answer is an error."""

import logging
import pickle
import secrets

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from optional_packages import require

from tfdist.data import from_parquet
from tfdist.data.parquet_files import data_in_store
from tfdist.utils import remote_requests

require("fsspec")
from fsspec.implementations.memory import MemoryFileSystem  # noqa: E402


def write(folder, name, ids, first=0):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = {column: np.arange(first, first + ids) + number for number, column in enumerate("abc")}
    pq.write_table(pa.table(columns), path, row_group_size=4, compression="none")


@pytest.fixture
def folder(tmp_path):
    for name, ids in (("part-1", 5), ("part-0", 9), ("more/part-2", 3), ("_hidden", 1), ("more/.hidden", 1)):
        write(tmp_path, f"{name}.parquet", ids)
    return tmp_path


@pytest.fixture
def url(folder):
    url = f"memory://bucket/{secrets.token_hex(8)}"
    MemoryFileSystem().put(f"{folder}/", url, recursive=True)
    return url


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(remote_requests, "_FIRST_PAUSE_SECONDS", 0.001)


def blocks_of(data):
    source = data._source
    return [source.read(block, ["c", "a"]).to_pydict() for block in range(len(source.rows_of_blocks))]


def test_a_url_gives_the_blocks_of_a_path(folder, url):
    local, remote = from_parquet(folder), from_parquet(f"{url}/")
    assert [file.removeprefix(url) for file in remote._source.files] == [
        file.removeprefix(str(folder)) for file in local._source.files
    ]
    assert remote.rows_of_blocks == local.rows_of_blocks == (3, 4, 4, 1, 4, 1) and remote.schema == local.schema
    assert blocks_of(remote) == blocks_of(pickle.loads(pickle.dumps(remote))) == blocks_of(local)
    names = ["part-1.parquet", "_hidden.parquet", "more"]
    chosen = from_parquet([f"{url}/{name}" for name in names])
    assert blocks_of(chosen) == blocks_of(from_parquet([folder / name for name in names]))
    both = from_parquet([folder / "more", f"{url}/more"])
    assert blocks_of(both) == 2 * blocks_of(from_parquet(folder / "more"))


def test_large_ranges_are_read_in_parts(folder, url, monkeypatch):
    from tfdist.data import remote_files

    ranges, stock = [], MemoryFileSystem.cat_file
    monkeypatch.setattr(remote_files, "_PART_BYTES", 7)
    monkeypatch.setattr(
        MemoryFileSystem,
        "cat_file",
        lambda self, path, start, end: ranges.append(end - start) or stock(self, path, start, end),
    )
    assert blocks_of(from_parquet(url)) == blocks_of(from_parquet(folder))
    assert max(ranges) == 7


def test_only_the_columns_of_a_row_group_are_read(tmp_path, monkeypatch):
    url, rows = f"memory://bucket/{secrets.token_hex(8)}", 1 << 16
    pq.write_table(
        pa.table({name: np.random.default_rng(0).random(rows) for name in "abcd"}),
        tmp_path / "rows.parquet",
        row_group_size=rows // 4,
        compression="none",
        use_dictionary=False,
    )
    MemoryFileSystem().put(f"{tmp_path}/rows.parquet", f"{url}/rows.parquet")
    data, sizes, stock = from_parquet(url), [], MemoryFileSystem.cat_file
    monkeypatch.setattr(
        MemoryFileSystem,
        "cat_file",
        lambda self, path, start, end: sizes.append(end - start) or stock(self, path, start, end),
    )
    data._source.read(2, ["b"])
    values = rows // 4 * 8
    assert values < sum(sizes) < values + 70_000, "a column of a row group, and the end of the file with its footer"


@pytest.mark.parametrize("ids", [9, 5, 90, None])
def test_a_file_that_is_replaced_is_an_error(folder, url, ids):
    """Also by one of the same size and with the same row groups, of which a reader has the footer."""
    data = from_parquet(url)
    assert data._source.read(1, ["a"]).num_rows == 4
    name = "part-0.parquet"
    size = (folder / name).stat().st_size
    MemoryFileSystem().rm_file(f"{url}/{name}")
    if ids is not None:
        write(folder, name, ids, first=1)
        assert ((folder / name).stat().st_size == size) == (ids == 9)
        MemoryFileSystem().put(f"{folder}/{name}", f"{url}/{name}")
    expected = f"has changed since the driver counted its rows: {url}/{name}. Received: "
    for block in (1, 2, 3):
        with pytest.raises(RuntimeError, match=expected + (r"\(\d+, '" if ids else "no file")):
            data._source.read(block, ["a", "c"])
        data = pickle.loads(pickle.dumps(data))  # once with the open file, then without
    assert data._source.read(0, ["a"]).num_rows == 3


class _Failing:
    """Requests of the memory that fail for some time."""

    def __init__(self, monkeypatch, name, error):
        self.left, self.error, self.stock = 0, error, getattr(MemoryFileSystem, name)
        monkeypatch.setattr(MemoryFileSystem, name, lambda *arguments, **options: self(*arguments, **options))

    def __call__(self, *arguments, **options):
        if self.left:
            self.left -= 1
            raise self.error
        return self.stock(*arguments, **options)


def test_requests_that_fail_are_repeated_for_some_time(folder, url, monkeypatch, caplog):
    data = from_parquet(url)
    failing = _Failing(monkeypatch, "cat_file", OSError(16, "SlowDown"))
    for left in (5, 3):
        failing.left = left
        assert data._source.read(1, ["a"]).num_rows == 4 and not failing.left
    assert not caplog.records
    monkeypatch.setattr(remote_requests, "PATIENCE_SECONDS", 0.5)
    monkeypatch.setattr(remote_requests, "_REPORTED_AFTER_SECONDS", 0.05)
    failing.left = 10**6
    name = f"{url.removeprefix('memory:/')}/part-1.parquet"
    with (
        caplog.at_level(logging.WARNING, "tfdist"),
        pytest.raises(RuntimeError, match=f"The object '{name}' could not be read. Received: OSError: .*SlowDown"),
    ):
        data._source.read(4, ["a"])
    assert [record.message[: 40 + len(name)] for record in caplog.records] == [
        f"The object '{name}' could not be read, which is t"[: 40 + len(name)]
    ]
    failing.left = 8  # pauses of 0.255 s together
    assert data._source.read(4, ["a"]).num_rows == 4, "each block has its own patience"


def test_a_store_that_refuses_says_so_at_the_start(url, monkeypatch):
    from tfdist.data import remote_files

    monkeypatch.setattr(remote_files, "START_PATIENCE_SECONDS", 0.05)
    failing = _Failing(monkeypatch, "info", PermissionError("Access Denied"))
    failing.left = 10**6
    expected = "could not be listed. Received: PermissionError: Access Denied.* permission to read and list"
    with pytest.raises(RuntimeError, match=expected):
        from_parquet(url)


def test_a_server_without_ranges_is_an_error(url, monkeypatch):
    stock = MemoryFileSystem.cat_file
    data = from_parquet(url)
    monkeypatch.setattr(MemoryFileSystem, "cat_file", lambda self, path, start, end: stock(self, path))
    monkeypatch.setattr(remote_requests, "PATIENCE_SECONDS", 0.05)
    with pytest.raises(RuntimeError, match=r"\d+ bytes for a range of \d+: the server must send ranges"):
        data._source.read(0, ["a"])


def test_urls_without_files_are_errors(url):
    with pytest.raises(FileNotFoundError, match="There are no Parquet files. Received: '.*/nothing'"):
        from_parquet([url, f"{url}/nothing"])
    with pytest.raises(ValueError, match="Invalid `paths`: an address of unknown kind. Received: paths='nowhere://x'"):
        from_parquet("nowhere://x")


def test_files_of_a_store_are_removed(folder, caplog):
    store = f"memory://bucket/{secrets.token_hex(8)}"
    files = MemoryFileSystem()
    with data_in_store(
        store, lambda path: files.put(f"{folder}/", path, recursive=True), keep=False, engine="A test"
    ) as data:
        assert data.num_rows == 17 and len(files.find(store)) == 5
    assert files.find(store) == [] and not caplog.records
