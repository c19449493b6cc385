"""Data of Spark: its executors write Parquet in parallel to a path that the workers share, as Horovod's Store."""

import os
from typing import Any

from tfdist.data.arrow_import import import_library
from tfdist.data.parquet_files import data_in_store
from tfdist.data.partitioned_data import PartitionedData

_ROW_GROUP_BYTES = 32 << 20  # a few of them are in a worker's memory


def from_spark(
    df: Any, *, store: str | os.PathLike[str], vector_dtype: str = "float32", keep: bool = False
) -> PartitionedData:
    """Writes a DataFrame of Spark to Parquet files, and returns their data, for all workers.

    Columns of MLlib's vectors, dense or sparse, become lists of numbers. Call this on Spark's driver.

    Args:
        df: A `pyspark.sql.DataFrame`. It is computed once.
        store: A directory that the driver, the executors and the workers share under the same path: of a network file
            system, or `hdfs://`, `s3://`. The files are written to a new directory in it.
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


def with_lists_for_vectors(df: Any, dtype: str) -> Any:
    """Returns a DataFrame whose columns of MLlib's vectors are lists of numbers."""
    vectors = [field.name for field in df.schema.fields if type(field.dataType).__name__ == "VectorUDT"]
    if not vectors:
        return df
    from pyspark.ml.functions import vector_to_array

    return df.withColumns({name: vector_to_array(df[_quoted(name)], dtype) for name in vectors})


def _quoted(name: str) -> str:
    return f"`{name.replace('`', '``')}`"
