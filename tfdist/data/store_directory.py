"""A directory of Parquet files that an engine writes for the workers: where it is, and who removes it."""

import os
import secrets
import weakref
from collections.abc import Callable
from typing import Any

from tfdist.data.parquet_files import file_system, is_remote, parquet_source
from tfdist.data.partitioned_data import PartitionedData


def data_in_store(
    store: str | os.PathLike[str], write: Callable[[str], int | None], *, keep: bool, engine: str
) -> PartitionedData:
    """Lets an engine write Parquet files to a new directory, and returns their data.

    Args:
        store: A directory that the driver, the engine and all workers share under the same path.
        write: Takes the path of a new directory, writes files there, and returns the number of rows, if known.
        keep: Whether the files stay when the data is closed.
        engine: The name of the engine, for messages.

    Raises:
        RuntimeError: The driver does not see what the engine has written.
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
        found = sum(source.rows_of_blocks)
    except FileNotFoundError:
        source, found = None, 0
    if source is None or (rows is not None and found != rows):
        raise RuntimeError(
            f"The driver does not see all rows that {engine} has written to {path}. Received: {found} rows. Expected: "
            f"{'some' if rows is None else rows}. `store` must be a directory that the driver, the hosts of {engine} "
            "and all workers share under the same path: a network file system, hdfs:// or an object store."
        )
    return PartitionedData(source)


def _remove(path: str) -> None:
    """Removes a directory with what is in it; without an error if it has gone."""
    system, inner = file_system(path if not path.startswith("file:") else "/" + path[5:].lstrip("/"))
    try:
        system.delete_dir(inner)
    except OSError:
        return
