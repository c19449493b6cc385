"""Compares the data of `tfdist.data` with `tf.data` on the same Parquet files, in rows a second.

    python benchmarks/engine_data.py
    python benchmarks/engine_data.py --engines parquet --rounds 3

One process reads all rows once and discards them. Everything is local, and the files are in the page cache. Readers:

- **by batches**, what is written in a few lines: `ParquetFile.iter_batches` in `Dataset.from_generator`, a batch as
  NumPy arrays, then `prefetch`.
- **by row groups**, the fastest that was found for plain `tf.data`: whole row groups in `from_generator`, then
  `rebatch` and `prefetch`.
- **tfdist**: `from_parquet`, or the engine's function. `from_spark` reads the files that Spark has written, and so do
  its references; `from_dask` and `from_ray` get a data frame of the files, whose rows their processes hold.

Rows are 32 columns of float32, which become one vector, and a label; or a list of 64 float32 and a label. Readers take
turns; the figures are medians of rows a second, and of the ratios within a round.

Writes `engine_data.json` to `benchmarks/results` and prints a table.
"""

import argparse
import contextlib
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tensorflow as tf

from tfdist.data import PartitionedData, from_dask, from_parquet, from_ray, from_spark

_RESULTS = Path(__file__).parent / "results" / "engine_data.json"
_COLUMNS, _LIST, _BATCH = 32, 64, 1024
_FILES, _ROWS_OF_FILE, _ROW_GROUP = 8, 150_000, 15_000
_NAMES = [f"x{number}" for number in range(_COLUMNS)]
_MEMORY_BYTES = 1 << 30
Reader = Callable[[], tf.data.Dataset]


def write_files(folder: Path) -> None:
    """Writes the files of both kinds of rows."""
    generator = np.random.default_rng(0)
    for kind in ("columns", "list"):
        (folder / kind).mkdir()
        for number in range(_FILES):
            label = pa.array(generator.integers(10, size=_ROWS_OF_FILE))
            if kind == "columns":
                values = generator.normal(size=[_COLUMNS, _ROWS_OF_FILE]).astype(np.float32)
                table = pa.table({**dict(zip(_NAMES, map(pa.array, values), strict=True)), "label": label})
            else:
                flat = pa.array(generator.normal(size=_LIST * _ROWS_OF_FILE).astype(np.float32))
                table = pa.table({"x": pa.FixedSizeListArray.from_arrays(flat, _LIST), "label": label})
            pq.write_table(table, folder / kind / f"part-{number}.parquet", row_group_size=_ROW_GROUP)


def features_of(batch: Any, kind: str) -> np.ndarray:
    """Returns the features of Arrow rows as one array."""
    if kind == "columns":
        return np.stack([batch.column(name).to_numpy() for name in _NAMES], axis=1)
    column = batch.column("x")
    column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    return column.flatten().to_numpy().reshape(len(batch), -1)


def by_batches(folder: Path, kind: str) -> tf.data.Dataset:
    """Record batches in a generator."""

    def batches() -> Iterator[Any]:
        for file in sorted(folder.glob("*.parquet")):
            for batch in pq.ParquetFile(file).iter_batches(_BATCH):
                yield features_of(batch, kind), batch.column("label").to_numpy()

    return tf.data.Dataset.from_generator(batches, output_signature=_signature(kind)).prefetch(4)


def by_row_groups(folder: Path, kind: str) -> tf.data.Dataset:
    """Row groups in a generator, cut into batches by TensorFlow."""

    def groups() -> Iterator[Any]:
        for path in sorted(folder.glob("*.parquet")):
            file = pq.ParquetFile(path, memory_map=True)
            for group in range(file.num_row_groups):
                table = file.read_row_group(group)
                yield features_of(table, kind), table.column("label").to_numpy()

    signature = _signature(kind)
    return tf.data.Dataset.from_generator(groups, output_signature=signature).prefetch(1).rebatch(_BATCH).prefetch(4)


def ours(data: PartitionedData, kind: str, **options: Any) -> Reader:
    """Returns the reader of a handle."""
    features = _NAMES if kind == "columns" else "x"
    return lambda: data.dataset(_BATCH, features=features, label="label", **options)


def rows_per_second(reader: Reader) -> float:
    """Reads all rows."""
    start, rows = time.perf_counter(), 0
    for _, label in reader():
        rows += int(label.shape[0])
    if rows != _FILES * _ROWS_OF_FILE:
        raise RuntimeError(f"A reader has lost rows. Received: {rows}. Expected: {_FILES * _ROWS_OF_FILE}.")
    return rows / (time.perf_counter() - start)


def compare(readers: dict[str, Reader], rounds: int) -> dict[str, Any]:
    """Returns the median speeds and the ratios to both references. Readers take turns; the first round warms up."""
    seen: dict[str, list[float]] = {name: [] for name in readers}
    for number in range(rounds + 1):
        names = list(readers)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            speed = rows_per_second(readers[name])
            if number:
                seen[name].append(speed)
    result: dict[str, Any] = {}
    for name, speeds in seen.items():
        result[name] = {"rows_per_second": round(statistics.median(speeds))}
        for reference in ("by batches", "by row groups"):
            if not name.startswith("by "):
                ratios = [one / other for one, other in zip(speeds, seen[reference], strict=True)]
                result[name][f"ratio to {reference}"] = {
                    "median": round(statistics.median(ratios), 3),
                    "all": [round(ratio, 3) for ratio in ratios],
                }
    return result


@contextlib.contextmanager
def parquet(folder: Path, kind: str) -> Iterator[tuple[Path, dict[str, Reader]]]:
    """`from_parquet`, as the files are, and shuffled."""
    data = from_parquet(folder / kind)
    yield folder / kind, {"tfdist": ours(data, kind), "tfdist, shuffled": ours(data, kind, shuffle=True, seed=1)}


@contextlib.contextmanager
def spark(folder: Path, kind: str) -> Iterator[tuple[Path, dict[str, Reader]]]:
    """`from_spark`."""
    from pyspark.sql import SparkSession

    session = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    store = folder / f"store-{kind}"
    with from_spark(session.read.parquet(str(folder / kind)), store=store) as data:
        session.stop()
        (written,) = store.iterdir()
        yield written, {"tfdist": ours(data, kind)}


@contextlib.contextmanager
def dask(folder: Path, kind: str) -> Iterator[tuple[Path, dict[str, Reader]]]:
    """`from_dask`: the partitions are in the memory of two other processes; and by a store."""
    import dask.dataframe
    from distributed import Client, LocalCluster

    options = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": None}
    with LocalCluster(processes=True, **options) as cluster, Client(cluster):
        frame = dask.dataframe.read_parquet(folder / kind, split_row_groups=True)
        with from_dask(frame) as held, from_dask(frame, store=folder / "store-dask") as stored:
            yield folder / kind, {"tfdist": ours(held, kind), "tfdist, store": ours(stored, kind)}


@contextlib.contextmanager
def ray(folder: Path, kind: str) -> Iterator[tuple[Path, dict[str, Reader]]]:
    """`from_ray`: the blocks are in the object store of this machine; and by a store."""
    import ray as engine

    options = {"include_dashboard": False, "log_to_driver": False, "configure_logging": False}
    engine.init(num_cpus=2, object_store_memory=_MEMORY_BYTES, **options)
    try:
        dataset = engine.data.read_parquet(str(folder / kind), override_num_blocks=_FILES * 4)
        with from_ray(dataset) as held, from_ray(dataset, store=folder / f"store-ray-{kind}") as stored:
            yield folder / kind, {"tfdist": ours(held, kind), "tfdist, store": ours(stored, kind)}
    finally:
        engine.shutdown()


_CASES = {
    "parquet, columns": (parquet, "columns"),
    "parquet, lists": (parquet, "list"),
    "spark, columns": (spark, "columns"),
    "dask, columns": (dask, "columns"),
    "ray, columns": (ray, "columns"),
    "ray, lists": (ray, "list"),
}


def main() -> None:
    """Measures the chosen cases, and writes their results beside those of others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", default=["parquet", "spark", "dask", "ray"], help="all by default")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each reader")
    arguments = parser.parse_args()
    results = json.loads(_RESULTS.read_text()) if _RESULTS.exists() else {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_files(folder)
        for case, (prepare, kind) in _CASES.items():
            if case.partition(",")[0] not in arguments.engines:
                continue
            with prepare(folder, kind) as (files, readers):
                references = {
                    "by batches": lambda files=files, kind=kind: by_batches(files, kind),
                    "by row groups": lambda files=files, kind=kind: by_row_groups(files, kind),
                }
                results[case] = compare({**references, **readers}, arguments.rounds)
            print(case)
            for reader, found in results[case].items():
                ratios = [f"{key} {value['median']}" for key, value in found.items() if key.startswith("ratio")]
                print(f"  {reader:18} {found['rows_per_second']:>10,} rows/s  {', '.join(ratios)}", flush=True)
    results["setup"] = {
        "rows": _FILES * _ROWS_OF_FILE,
        "batch": _BATCH,
        "row group": _ROW_GROUP,
        "rounds": arguments.rounds,
        "python": platform.python_version(),
        **{name: version(name) for name in ("tensorflow", "pyarrow", "ray", "pyspark", "distributed")},
    }
    _RESULTS.write_text(json.dumps(results, indent=2, sort_keys=True) + "\n")


def _signature(kind: str) -> tuple[tf.TensorSpec, tf.TensorSpec]:
    width = _COLUMNS if kind == "columns" else _LIST
    return tf.TensorSpec([None, width], tf.float32), tf.TensorSpec([None], tf.int64)


if __name__ == "__main__":
    main()
