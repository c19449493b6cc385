"""Where rows come from: ordered blocks of known sizes, each of which any process can read as an Arrow table."""

import abc
from collections.abc import Sequence
from typing import Any

from tfdist.utils.optional_modules import import_library


class BlockSource(abc.ABC):
    """Ordered blocks of rows: row groups of Parquet files, partitions of Dask, blocks of Ray.

    A source is pickled on the driver and reads in other processes, which connect to its engine with the first block.
    """

    schema: Any  # a `pyarrow.Schema` of all blocks
    rows_of_blocks: Sequence[int]  # none of them is 0

    @abc.abstractmethod
    def read(self, block: int, columns: Sequence[str]) -> Any:
        """Returns the columns of a block as a `pyarrow.Table`. Several threads may call this at once.

        Raises:
            RuntimeError: The block cannot be read; the message says why and what to do.
        """

    @abc.abstractmethod
    def name_of(self, block: int) -> str:
        """Returns what to call a block in messages: its file and row group, or its partition."""

    def close(self) -> None:
        """Ends what this process has opened to read, such as a connection. Reading opens it again."""
        return


class ChangedDataError(RuntimeError):
    """The rows are others than those that the driver has counted."""


def changed(place: str, received: str, expected: str) -> ChangedDataError:
    """Returns the error of data that was replaced."""
    return ChangedDataError(
        f"The data has changed since the driver counted its rows: {place}. Received: {received}. Expected: {expected}. "
        "Write new data to another path, and create the data of the training again."
    )


def checked_rows(source: BlockSource, block: int, table: Any) -> Any:
    """Returns `table` if it has as many rows as were counted on the driver."""
    if table.num_rows != source.rows_of_blocks[block]:
        raise changed(source.name_of(block), f"{table.num_rows} rows", str(source.rows_of_blocks[block]))
    return table


def facts_of(table: Any) -> tuple[Any, int]:
    """Returns the schema and the number of rows of a table, which engines compute where it is."""
    return table.schema.remove_metadata(), table.num_rows


def import_arrow(module: str = "pyarrow") -> Any:
    """Returns a module of Apache Arrow, such as `pyarrow.parquet`."""
    return import_library(module, "reads data in columns", "spark` or `dask` or `ray")
