"""Data of Spark: its executors write Parquet, vectors of MLlib become lists, and files are removed."""

import gc
import shutil

import pytest
from local_spark import spark_session

from tfdist.data import from_spark

pytest.importorskip("pyspark", reason="PySpark is not installed")
pytestmark = [
    pytest.mark.usefixtures("cpus"),
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("java") is None, reason="Java is not installed"),
]


@pytest.fixture(scope="module")
def rows():
    from pyspark.ml.feature import VectorAssembler
    from pyspark.sql import functions

    with spark_session("local[2]") as session:
        columns = ["id", (functions.col("id") * 0.5).alias("a"), functions.timestamp_seconds("id").alias("t")]
        frame = session.range(0, 50, 1, 3).select(*columns)
        yield VectorAssembler(inputCols=["a", "id"], outputCol="features").transform(frame)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_vectors_become_tensors(rows, tmp_path, dtype):
    with from_spark(rows, store=tmp_path, vector_dtype=dtype) as data:
        batches = list(data.dataset(20, features={"v": "features", "t": "t"}, label="id").as_numpy_iterator())
        assert sum((y.tolist() for _, y in batches), []) == list(range(50))
        first = batches[0][0]
        assert first["v"].dtype == dtype and first["v"][:2].tolist() == [[0, 0], [0.5, 1]]
        assert first["t"][:2].tolist() == [0, 1_000_000]
    assert not list(tmp_path.iterdir())


def test_files_are_removed_with_the_object_and_kept_on_demand(rows, tmp_path):
    data = from_spark(rows, store=tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    del data
    gc.collect()
    assert not list(tmp_path.iterdir())
    from_spark(rows, store=tmp_path, keep=True).close()
    assert len(list(tmp_path.iterdir())) == 1


def test_an_unknown_type_of_vectors_is_refused(rows, tmp_path):
    with pytest.raises(ValueError, match="Invalid `vector_dtype`"):
        from_spark(rows, store=tmp_path, vector_dtype="float16")
