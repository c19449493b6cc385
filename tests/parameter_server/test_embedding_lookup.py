"""Splits tables of embeddings over servers; lookups run in test_cluster_training.py."""

import pytest

from tfdist.keras_internals.scheduled_training import shard_sizes
from tfdist.parameter_server.worker_scope import num_parts

pytestmark = pytest.mark.usefixtures("cpus")


@pytest.mark.parametrize(("rows", "parts"), [(10, 4), (4, 4), (9, 1), (1001, 2)])
def test_parts_of_a_table_are_nearly_even(rows, parts):
    sizes = shard_sizes(rows, parts)
    assert len(sizes) == parts and sum(sizes) == rows and max(sizes) - min(sizes) <= 1


def test_a_partitioner_splits_rows():
    assert num_parts(None, (10, 4)) == 1
    assert num_parts(lambda shape, dtype: [3, 1], (10, 4)) == 3
    assert num_parts(lambda shape, dtype: [30, 1], (10, 4)) == 10
    with pytest.raises(ValueError, match=r"split by its rows\. Received: \[1, 2\] .* table of \(10, 4\)\. Expected"):
        num_parts(lambda shape, dtype: [1, 2], (10, 4))
