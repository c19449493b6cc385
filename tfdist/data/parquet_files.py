"""Parquet files on a path or at a URL that all workers share: their row groups are the blocks."""

import concurrent.futures
import logging
import os
import secrets
import shutil
import stat
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from tfdist.data.block_source import BlockSource, import_arrow
from tfdist.data.partitioned_data import PartitionedData
from tfdist.data.remote_files import RemoteFile, RemoteFiles, is_remote
from tfdist.utils.optional_modules import import_library
from tfdist.utils.remote_requests import START_PATIENCE_SECONDS, RequestError

_READING_FOOTERS = 8  # threads
# The unit of Spark's timestamps. Nanoseconds cannot hold most of them: those of year 9999 would come out as others.
_INT96 = "us"
_ROW_GROUP_BYTES = 32 << 20  # of those that Spark writes; a few of them are in a worker's memory
_log = logging.getLogger("tfdist")


def from_parquet(paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> PartitionedData:
    """Returns the data of Parquet files, for all workers.

    Reads the footers of all files, no rows. Workers read the files by the same paths.

    Args:
        paths: A file, a directory, whose files are read in the order of their names, also in sub-directories, without
            those that begin with `_` or `.`, or a list of these. On a file system, or URLs that fsspec knows:
            `s3://bucket/rows`, `gs://`, `az://`, `hdfs://`; files by name also of web servers, `https://`. Credentials
            are those of fsspec's library, in the environment of this process and of the workers.

    Raises:
        ImportError: If pyarrow, or fsspec or its library for a URL, is not installed.
        FileNotFoundError: There are no files.
        RuntimeError: An object store does not answer, or refuses, for 30 s.
        ValueError: The files have different columns, a file is not Parquet, or fsspec does not know a URL.
    """
    return PartitionedData(parquet_source(paths))


def from_spark(
    df: Any, *, store: str | os.PathLike[str], vector_dtype: str = "float32", keep: bool = False
) -> PartitionedData:
    """Writes a DataFrame of Spark to Parquet files, and returns their data, for all workers.

    Columns of MLlib's vectors, dense or sparse, become lists of numbers. Call this on Spark's driver.

    Args:
        df: A `pyspark.sql.DataFrame`. It is computed once.
        store: A directory that the driver, the executors and the workers share under the same path: of a network file
            system, or `hdfs://`, `s3a://`. The files are written to a new directory in it.
        vector_dtype: The type of the values of MLlib's vectors: "float32" or "float64".
        keep: Whether the files stay. By default they are removed when the returned object is closed or collected, at
            the latest when the driver's process ends.

    Raises:
        ImportError: If pyspark or pyarrow is not installed.
        RuntimeError: The driver does not see what the executors have written.
        ValueError: `vector_dtype` is invalid.
    """
    import_library("pyspark", "computes the DataFrame", "spark")
    from pyspark.sql import Observation, functions

    if vector_dtype not in ("float32", "float64"):
        raise ValueError(
            f"Invalid `vector_dtype`. Received: vector_dtype={vector_dtype!r}. Expected: 'float32' or 'float64'."
        )
    counted = Observation("tfdist")
    columns = with_lists_for_vectors(df, vector_dtype).observe(counted, functions.count(functions.lit(1)).alias("rows"))

    def write(path: str) -> int:
        to = path if "://" in path or path.startswith("file:") else f"file://{path}"
        columns.write.option("parquet.block.size", _ROW_GROUP_BYTES).parquet(to)
        return int(counted.get["rows"])

    return data_in_store(store, write, keep=keep, engine="Spark")


def parquet_source(paths: Any) -> "ParquetSource":
    """Returns the blocks of Parquet files; see `from_parquet`."""
    import_arrow("pyarrow.parquet")
    path_list = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    remote = RemoteFiles()
    files = [file for path in path_list for file in _files(_absolute(os.fspath(path)), remote)]
    if not files:
        raise _no_files(str([os.fspath(path) for path in path_list]))

    def footer(file: str) -> tuple[Any, list[int], Any]:
        version = remote.version(file) if is_remote(file) else None
        return *_footer(file, version and remote.open(file, version, START_PATIENCE_SECONDS)), version

    with concurrent.futures.ThreadPoolExecutor(_READING_FOOTERS) as threads:
        footers = list(threads.map(footer, files))
    schema = footers[0][0]
    for file, (file_schema, _, _) in zip(files, footers, strict=True):
        if not file_schema.equals(schema):
            raise ValueError(
                f"Parquet files have different columns or types. Received: {_difference(schema, file_schema)} in "
                f"{file}, which differs from {files[0]}. Expected: the same columns in all files. Read them "
                "separately, or write them again with one schema."
            )
    blocks = [
        (file, group, rows) for file, (_, groups, _) in enumerate(footers) for group, rows in enumerate(groups) if rows
    ]
    return ParquetSource(schema, files, blocks, remote, [version for _, _, version in footers])


class ParquetSource(BlockSource):
    """The row groups of Parquet files."""

    def __init__(
        self,
        schema: Any,
        files: Sequence[str],
        blocks: Sequence[tuple[int, int, int]],
        remote: RemoteFiles,
        versions: Sequence[Any],
    ) -> None:
        """Creates a source. `blocks` are the index of the file, the row group and the number of rows of each block.

        `versions` are those of files at URLs, which `remote` opens, None for others.
        """
        self.schema, self.files, self._blocks = schema, list(files), list(blocks)
        self._remote, self._versions = remote, list(versions)
        self.rows_of_blocks = [rows for _, _, rows in blocks]
        self._open = threading.local()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_open"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open = threading.local()

    def read(self, block: int, columns: Sequence[str]) -> Any:
        file, group, _ = self._blocks[block]
        opened = self._opened_file(file)
        remote: RemoteFile | None = opened.remote
        try:
            if opened.parquet is None:
                opened.parquet = _parquet_file(self.files[file], remote)
            table = opened.parquet.read_row_group(group, columns=list(columns))
        except (OSError, IndexError, import_arrow().ArrowInvalid) as error:
            if remote is not None:
                remote.check()
            raise RuntimeError(
                f"A file of the data cannot be read: {self.files[file]}. Received: {error}. Expected: the file that "
                "the driver saw, under the same path. All workers must see the path; and files of a `store` live as "
                "long as the driver's object."
            ) from error
        if remote is not None:
            remote.check()
        return table

    def name_of(self, block: int) -> str:
        file, group, _ = self._blocks[block]
        return f"row group {group} of {self.files[file]}"

    def _opened_file(self, file: int) -> Any:
        """Returns what is open in this thread: `parquet`, whose footer is read once, over `remote`, None for a path."""
        opened = self._open
        if getattr(opened, "file", None) != file:
            version = self._versions[file]
            opened.remote = version and self._remote.open(self.files[file], version)
            opened.file, opened.parquet = file, None
        elif opened.remote is not None:
            opened.remote.begin()
        return opened


def _absolute(path: str) -> str:
    local = path.removeprefix("file:") if path.startswith("file:/") else path
    return local if is_remote(local) else os.path.abspath("/" + local.lstrip("/") if local != path else local)


def _files(path: str, remote: RemoteFiles) -> list[str]:
    """Returns a file, or the files of a directory in the order of their names."""
    try:
        found = remote.find(path) if is_remote(path) else _local_files(path)
    except FileNotFoundError as error:
        raise _no_files(f"{path!r}, {error.__cause__ or error}") from error
    root = len(path.rstrip("/"))
    hidden = ("_", ".")
    return sorted(
        file
        for file in found
        if file == path or not any(part.startswith(hidden) for part in file[root:].strip("/").split("/"))
    )


def _local_files(path: str) -> list[str]:
    if not stat.S_ISDIR(os.stat(path).st_mode):
        return [path]
    files = import_arrow("pyarrow.fs")
    infos = files.LocalFileSystem().get_file_info(files.FileSelector(path, recursive=True))
    return [info.path for info in infos if info.type == files.FileType.File]


def _no_files(received: str) -> FileNotFoundError:
    return FileNotFoundError(
        f"There are no Parquet files. Received: {received}. Expected: files, or directories with files whose names do "
        "not begin with `_` or `.`. Check that the path is right, and that this host sees it."
    )


def _parquet_file(path: str, remote: RemoteFile | None) -> Any:
    parquet = import_arrow("pyarrow.parquet")
    if remote is None:
        return parquet.ParquetFile(path, memory_map=True, coerce_int96_timestamp_unit=_INT96)
    return parquet.ParquetFile(remote, pre_buffer=True, coerce_int96_timestamp_unit=_INT96)


def _footer(path: str, remote: RemoteFile | None) -> tuple[Any, list[int]]:
    """Returns the schema of a file, and the numbers of rows of its row groups."""
    arrow = import_arrow()
    try:
        file = _parquet_file(path, remote)
    except arrow.ArrowInvalid as error:
        raise ValueError(
            f"A file is not Parquet: {path}. Received: {error}. Expected: Parquet files only. Give the files by name, "
            "or move the others."
        ) from error
    with file:
        groups = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
        return file.schema_arrow.remove_metadata(), groups


def _difference(first_schema: Any, file_schema: Any) -> str:
    before, now = (
        dict(zip(first_schema.names, first_schema.types, strict=True)),
        dict(zip(file_schema.names, file_schema.types, strict=True)),
    )
    changed = [name for name in [*before, *now] if before.get(name) != now.get(name)]
    if not changed:
        return "another order of columns, or other names twice"
    name = changed[0]
    return f"column {name!r} {now.get(name, 'missing')} instead of {before.get(name, 'missing')}"


def data_in_store(
    store: str | os.PathLike[str], write: Callable[[str], int | None], *, keep: bool, engine: str
) -> PartitionedData:
    """Lets an engine write Parquet files to a new directory, and returns their data.

    `write` takes the path of a new directory, writes files there, and returns the number of rows, if known.
    """
    root = os.fspath(store)
    root = root if is_remote(root) or root.startswith("file:") else os.path.abspath(root)
    path = f"{root.rstrip('/')}/tfdist-data-{secrets.token_hex(8)}"
    try:
        rows = write(path)
        data = _seen(path, rows, engine)
    except BaseException:
        _remove(path)
        raise
    if keep:
        return data
    # An object without rows, so that pickled copies, which release nothing, do not refer to the directory's owner.
    release = weakref.finalize(data, _remove, path)
    data._release = release
    return data


def _seen(path: str, rows: int | None, engine: str) -> PartitionedData:
    try:
        source: Any = parquet_source(path)
        visible_rows = sum(source.rows_of_blocks)
    except FileNotFoundError:
        source, visible_rows = None, 0
    if source is None or (rows is not None and visible_rows != rows):
        raise RuntimeError(
            f"The driver does not see all rows that {engine} has written to {path}. Received: {visible_rows} rows. "
            f"Expected: {'some' if rows is None else rows}. `store` must be a directory that the driver, the hosts of "
            f"{engine} and all workers share under the same path: a network file system, hdfs:// or an object store."
        )
    return PartitionedData(source)


def _remove(path: str) -> None:
    """Removes a directory with what is in it; without an error if it has gone."""
    if not is_remote(path):
        shutil.rmtree(_absolute(path), ignore_errors=True)
        return
    try:
        RemoteFiles().remove(path)
    except RequestError as error:
        _log.warning("Files of the data stay at %s, and can be removed by hand. Received: %s", path, error)


def with_lists_for_vectors(df: Any, dtype: str) -> Any:
    """Returns a DataFrame whose columns of MLlib's vectors are lists of numbers."""
    vectors = [field.name for field in df.schema.fields if type(field.dataType).__name__ == "VectorUDT"]
    if not vectors:
        return df
    from pyspark.ml.functions import vector_to_array

    return df.withColumns({name: vector_to_array(df[quoted(name)], dtype) for name in vectors})


def quoted(name: str) -> str:
    """Returns the whole name of a column, which may contain dots, as Spark reads it."""
    return f"`{name.replace('`', '``')}`"
