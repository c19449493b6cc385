"""Data of Dask: its workers hold the partitions as Arrow tables, and each training process fetches those it needs."""

import os
import threading
import time
from collections.abc import Sequence
from typing import Any

from tfdist.data.block_source import BlockSource, facts_of, import_arrow
from tfdist.data.parquet_files import data_in_store
from tfdist.data.partitioned_data import PartitionedData
from tfdist.utils.optional_modules import import_library

_READ_SECONDS = 300.0
_RETRY_SECONDS = 15.0


def from_dask(
    ddf: Any,
    *,
    client: Any = None,
    store: str | os.PathLike[str] | None = None,
    keep: bool = False,
    timeout_seconds: float = _READ_SECONDS,
) -> PartitionedData:
    """Returns the data of a Dask DataFrame, for all workers.

    Without `store` Dask computes the partitions once and holds them in the memory of its workers, as long as the
    returned object lives. Processes that train connect to Dask's scheduler as clients, and fetch the partitions that
    they need, directly from the worker that has them. If that worker is lost, Dask computes its partitions again.
    tfdist must be installed on Dask's workers.

    Args:
        ddf: A `dask.dataframe.DataFrame`. The index is not part of the data: call `reset_index` for it.
        client: The `distributed.Client`; by default the present one.
        store: A directory that this process, Dask's workers and the workers of the training share: Dask writes Parquet
            there, and no training process connects to Dask.
        keep: Whether the files in `store` stay. By default they are removed when the returned object is closed or
            collected, at the latest when this process ends.
        timeout_seconds: How long to wait for a partition.

    Raises:
        ImportError: If dask or pyarrow is not installed.
        RuntimeError: Dask cannot compute the partitions.
        TimeoutError: It does not do so in time.
        ValueError: The partitions have different columns.
    """
    distributed = import_library("distributed", "holds the partitions", "dask")
    import_library("dask.dataframe", "computes the partitions", "dask")
    import_arrow()
    if store is not None:

        def write(path: str) -> None:
            ddf.to_parquet(path, write_index=False, write_metadata_file=False, name_function=_file_name)

        return data_in_store(store, write, keep=keep, engine="Dask")
    client = distributed.default_client() if client is None else client
    tables = client.compute(list(ddf.map_partitions(_keep_frame).to_delayed()))
    tables = client.map(arrow_table, tables, pure=False)
    facts = client.gather(client.map(facts_of, tables, pure=False))
    schemas = {number: schema for number, (schema, rows) in enumerate(facts) if rows} or {0: facts[0][0]}
    first = next(iter(schemas.values()))
    for number, schema in schemas.items():
        if not schema.equals(first):
            raise ValueError(
                f"Partitions of Dask have different types. Received: partition {number} with {schema.to_string()!r}. "
                f"Expected: {first.to_string()!r}. Cast the columns with `astype`; columns of objects may hold "
                "anything."
            )
    blocks = [(number, rows) for number, (_, rows) in enumerate(facts) if rows]
    source = DaskSource(first, [tables[number].key for number, _ in blocks], blocks, client, timeout_seconds)
    held = list(tables)  # Dask keeps a table as long as a future refers to it
    return PartitionedData(source, release=held.clear)


def arrow_table(frame: Any) -> Any:
    """Returns a partition as a `pyarrow.Table` without its index.

    NaN of NumPy's floating-point columns stays NaN: only columns that know missing values have null.
    """
    arrow = import_arrow()
    arrays = []
    for position in range(frame.shape[1]):
        values = frame.iloc[:, position]
        is_plain = values.dtype.kind == "f" and type(values.dtype).__module__.startswith("numpy")
        array = arrow.array(values.to_numpy(), from_pandas=False) if is_plain else arrow.array(values)
        # Partitions have different categories, and so different types of their indices.
        arrays.append(array.dictionary_decode() if arrow.types.is_dictionary(array.type) else array)
    return arrow.table(arrays, names=[str(name) for name in frame.columns])


class DaskSource(BlockSource):
    """Arrow tables that Dask's workers hold."""

    def __init__(
        self, schema: Any, keys: Sequence[str], blocks: Sequence[tuple[int, int]], client: Any, timeout_seconds: float
    ) -> None:
        """Creates a source. `blocks` are the number of the partition and the number of rows of each table.

        This process reads through `client`, others connect to its scheduler.
        """
        self.schema, self.rows_of_blocks = schema, [rows for _, rows in blocks]
        self._keys, self._partitions = list(keys), [number for number, _ in blocks]
        self._address, self._security, self._timeout = client.scheduler.address, client.security, timeout_seconds
        self._client = client
        self._owns_client = False
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        if self._address.startswith("inproc://"):
            raise ValueError(
                "Processes cannot connect to a scheduler of Dask that lives in one process. Received: address "
                f"{self._address}. Expected: a scheduler with a network address. Start `LocalCluster(processes=True)`, "
                "or give `from_dask` a `store`."
            )
        return {**self.__dict__, "_client": None, "_owns_client": False, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    def read(self, block: int, columns: Sequence[str]) -> Any:
        distributed = import_library("distributed", "holds the partitions", "dask")
        client = self._connected(distributed)
        try:
            return self._fetched(distributed, client, self._keys[block]).select(list(columns))
        except Exception as error:  # what a task of Dask has raised, or the loss of the scheduler
            raise RuntimeError(
                f"{self.name_of(block)} cannot be read from {self._address}. Received: {type(error).__name__}: "
                f"{error}. Expected: a partition that Dask holds. It does so as long as the object that `from_dask` "
                "returned lives in the driver."
            ) from error

    def name_of(self, block: int) -> str:
        return f"partition {self._partitions[block]} of the Dask DataFrame"

    def close(self) -> None:
        """Closes the client, if this process has opened it."""
        with self._lock:
            client, self._client = self._client, None
            if client is not None and self._owns_client:
                client.close()

    def _fetched(self, distributed: Any, client: Any, key: str) -> Any:
        """Returns a table; asks again while Dask computes it for a worker that was lost."""
        end = time.monotonic() + self._timeout
        while True:
            try:
                # A client is informed only about tasks that it has submitted: this one is known to have a result.
                future = distributed.Future(key, client, state="memory")
                return future.result(timeout=min(_RETRY_SECONDS, self._timeout))
            except TimeoutError:
                if time.monotonic() >= end:
                    raise

    def _connected(self, distributed: Any) -> Any:
        with self._lock:
            if self._client is None:
                try:
                    self._client = distributed.Client(
                        self._address,
                        security=self._security,
                        timeout=self._timeout,
                        set_as_default=False,
                        direct_to_workers=True,
                    )
                except OSError as error:
                    raise RuntimeError(
                        f"This process cannot connect to the scheduler of Dask. Received: {error}. Expected: a "
                        f"scheduler at {self._address}, as the driver sees it. Check that the address is reachable "
                        "from this host, or give `from_dask` a `store`."
                    ) from error
                self._owns_client = True
            return self._client


def _file_name(partition: int) -> str:
    """Returns a name that comes in the order of partitions, as files are read in the order of their names."""
    return f"part-{partition:08}.parquet"


def _keep_frame(frame: Any) -> Any:
    return frame
