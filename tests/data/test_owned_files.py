"""Files of a store live as long as a dataset that reads them, also if nothing else refers to the handle."""

import gc

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tfdist.data.parquet_files import data_in_store

pytestmark = pytest.mark.usefixtures("cpus")


def test_a_dataset_keeps_the_files_that_it_reads(tmp_path):
    def write(path):
        (tmp_path / path.rpartition("/")[2]).mkdir()
        pq.write_table(pa.table({"x": range(8)}), f"{path}/part.parquet", row_group_size=2)
        return 8

    dataset = data_in_store(tmp_path, write, keep=False, engine="Spark").dataset(2, features="x").map(abs).repeat(2)
    gc.collect()
    assert [x for batch in dataset.as_numpy_iterator() for x in batch] == [*range(8)] * 2
