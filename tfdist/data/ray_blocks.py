"""Data of Ray: its object store holds the blocks of a dataset, and each training process reads those it needs."""

import concurrent.futures
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Any

from tfdist.data.block_source import BlockSource, facts_of, import_arrow
from tfdist.data.parquet_files import data_in_store
from tfdist.data.partitioned_data import PartitionedData
from tfdist.utils.optional_modules import import_library

_READ_SECONDS = 300.0


def from_ray(
    dataset: Any,
    *,
    store: str | os.PathLike[str] | None = None,
    keep: bool = False,
    timeout_seconds: float = _READ_SECONDS,
) -> PartitionedData:
    """Returns the data of a Ray dataset, for all workers.

    Without `store` Ray computes the blocks once and holds them in its object store, as long as the returned object
    lives. An actor without CPUs, which the driver owns, gives references to the blocks to the processes that train.
    These connect to the cluster of Ray, unless they are part of it, and read the blocks from the memory of the host.

    Args:
        dataset: A `ray.data.Dataset`.
        store: A directory that this process, Ray's nodes and the workers of the training share: Ray writes Parquet
            there, and no training process connects to Ray.
        keep: Whether the files in `store` stay. By default they are removed when the returned object is closed or
            collected, at the latest when this process ends.
        timeout_seconds: How long to wait for a block.

    Raises:
        ImportError: If ray or pyarrow is not installed.
        ValueError: The blocks have different columns.
    """
    ray = import_library("ray", "holds the blocks", "ray")
    import_library("ray.data", "computes the blocks", "ray")
    import_arrow()
    if store is not None:
        return data_in_store(store, dataset.write_parquet, keep=keep, engine="Ray")
    tables = dataset.materialize().to_arrow_refs()
    describe = ray.remote(num_cpus=0)(facts_of)
    facts = ray.get([describe.remote(table) for table in tables])
    blocks = [(number, rows) for number, (_, rows) in enumerate(facts) if rows]
    schema = facts[blocks[0][0] if blocks else 0][0]
    for number, _ in blocks:
        if not facts[number][0].equals(schema):
            raise ValueError(
                f"Blocks of Ray have different types. Received: block {number} with {facts[number][0].to_string()!r}. "
                f"Expected: {schema.to_string()!r}. Cast the columns, as by `map_batches`."
            )
    name = f"tfdist-data-{secrets.token_hex(8)}"
    context = ray.get_runtime_context()
    holder = ray.remote(num_cpus=0)(_BlockHolder).options(name=name, namespace=name).remote(list(tables))
    ray.get(holder.number.remote(), timeout=timeout_seconds)
    held = [holder, tables]
    return PartitionedData(RaySource(schema, name, blocks, context.gcs_address, timeout_seconds), _releasing(ray, held))


class _BlockHolder:
    """An actor of the driver that holds references to blocks, for processes that are other drivers of Ray."""

    def __init__(self, tables: list[Any]) -> None:
        self._tables = tables

    def number(self) -> int:
        return len(self._tables)

    def reference(self, block: int) -> list[Any]:
        """Returns the reference of a block, in a list: Ray would replace it by the block otherwise."""
        return [self._tables[block]]


class RaySource(BlockSource):
    """Arrow tables in Ray's object store."""

    def __init__(
        self, schema: Any, holder: str, blocks: Sequence[tuple[int, int]], address: str, timeout_seconds: float
    ) -> None:
        """Creates a source of `blocks` (number in Ray, rows), which an actor holds; its namespace has the same name."""
        self.schema, self.rows_of_blocks = schema, [rows for _, rows in blocks]
        self._holder, self._numbers, self._address = holder, [number for number, _ in blocks], address
        self._timeout = timeout_seconds
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    def read(self, block: int, columns: Sequence[str]) -> Any:
        ray = import_library("ray", "holds the blocks", "ray")
        try:
            with self._lock:
                if not ray.is_initialized():
                    self._connect(ray)
                holder = ray.get_actor(self._holder, namespace=self._holder)
                (reference,) = ray.get(holder.reference.remote(self._numbers[block]), timeout=self._timeout)
            return ray.get(reference, timeout=self._timeout).select(list(columns))
        except Exception as error:  # errors of Ray have no common class, and a cluster that is gone raises several
            raise RuntimeError(
                f"{self.name_of(block)} cannot be read from {self._address}. Received: {type(error).__name__}: "
                f"{error}. Expected: a block that Ray holds. It does so as long as the object that `from_ray` returned "
                "lives in the driver, and the driver is connected."
            ) from error

    def _connect(self, ray: Any) -> None:
        """Connects in another thread: in the main one Ray would handle SIGTERM in place of FailureRecovery."""
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            thread.submit(ray.init, address=self._address, log_to_driver=False, configure_logging=False).result()

    def name_of(self, block: int) -> str:
        return f"block {self._numbers[block]} of the Ray dataset"


def _releasing(ray: Any, held: list[Any]) -> Callable[[], None]:
    """Returns a function that ends the actor, and forgets the blocks."""

    def release() -> None:
        if held and ray.is_initialized():
            ray.kill(held[0])
        held.clear()

    return release
