"""Data of Dask: partitions that Dask holds, read in this process and in others, and released."""

import pickle
import time

import numpy as np
import pytest
import tensorflow as tf
from child_environment import run_python
from optional_packages import require

from tfdist.data import from_dask

require("dask", "distributed", "pandas")
pytestmark = pytest.mark.usefixtures("cpus")
_SIZES = (5, 0, 13, 2)
_CHILD = """
import pickle, sys
data = pickle.load(open(sys.argv[1], "rb"))
data._source._timeout = 10
print([batch.tolist() for batch in data.dataset(6, features="id", streams=2).as_numpy_iterator()])
data.close()
"""


def partition(size, first):
    import pandas as pd

    ids = np.arange(first, first + size)
    columns = {
        "id": ids,
        "x": np.where(ids == 3, np.nan, ids * 0.5),
        "kind": pd.Categorical([f"k{i % 3}" for i in ids]),
    }
    return pd.DataFrame(columns)


def frame():
    from dask import dataframe, delayed

    firsts = np.cumsum((0, *_SIZES[:-1])).tolist()
    parts = [delayed(partition)(size, first) for size, first in zip(_SIZES, firsts, strict=True)]
    return dataframe.from_delayed(parts, meta=partition(1, 0), verify_meta=False)


@pytest.fixture(scope="module")
def client():
    import distributed

    options = {"n_workers": 1, "threads_per_worker": 2, "dashboard_address": None}
    with distributed.LocalCluster(processes=False, **options) as cluster, distributed.Client(cluster) as client:
        yield client


def keys_of(client):
    return set(client.run_on_scheduler(lambda dask_scheduler: list(dask_scheduler.tasks)))


def wait_until_released(client):
    end = time.monotonic() + 60
    while keys_of(client) and time.monotonic() < end:
        time.sleep(0.05)
    assert keys_of(client) == set()


def test_partitions_become_batches(client):
    with from_dask(frame(), client=client) as data:
        assert data.rows_of_blocks == (5, 13, 2)  # without the empty one
        batches = list(data.dataset(7, features={"x": "x", "kind": "kind"}, label="id").as_numpy_iterator())
        assert sum((y.tolist() for _, y in batches), []) == list(range(20))
        assert np.isnan(batches[0][0]["x"][3]) and batches[0][0]["kind"].tolist()[:3] == [b"k0", b"k1", b"k2"]
        with pytest.raises(ValueError, match="lives in one process"):
            pickle.dumps(data)
    wait_until_released(client)


def test_an_object_that_is_collected_releases_its_partitions(client):
    data = from_dask(frame(), client=client)
    assert keys_of(client)
    del data
    wait_until_released(client)


def test_a_store_has_files_that_are_removed(client, tmp_path):
    with from_dask(frame(), store=tmp_path) as data:
        (directory,) = tmp_path.iterdir()
        assert directory.name.startswith("tfdist-data-")
        ids = sum((ids.tolist() for ids in data.dataset(6, features="id").as_numpy_iterator()), [])
        assert ids == list(range(20))
    assert not list(tmp_path.iterdir())
    with from_dask(frame(), store=tmp_path, keep=True):
        pass
    assert len(list(tmp_path.iterdir())) == 1


def test_partitions_of_different_types_are_refused(client):
    import pandas as pd
    from dask import dataframe, delayed

    parts = [delayed(pd.DataFrame)({"id": values}) for values in ([1], [1.5])]
    mixed = dataframe.from_delayed(parts, meta=pd.DataFrame({"id": [1]}), verify_meta=False)
    with pytest.raises(ValueError, match="Partitions of Dask have different types"):
        from_dask(mixed, client=client)
    wait_until_released(client)


def child(path):
    return run_python("-c", _CHILD, path, limit_seconds=120, exit_code=None)


@pytest.mark.long
def test_other_processes_read_while_the_driver_holds_the_data(tmp_path):
    import distributed

    options = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": None}
    with distributed.LocalCluster(processes=True, **options) as cluster, distributed.Client(cluster) as client:
        data = from_dask(frame(), client=client)
        (tmp_path / "data").write_bytes(pickle.dumps(data))
        expected = [batch.tolist() for batch in data.dataset(6, features="id", streams=2).as_numpy_iterator()]
        read = child(tmp_path / "data")
        assert read.stdout.strip() == str(expected), read.stderr[-3000:]
        cluster.scale(1)  # partitions that its worker held are moved, or computed again
        read = child(tmp_path / "data")
        assert read.stdout.strip() == str(expected), read.stderr[-3000:]
        data.close()
        wait_until_released(client)
        assert "cannot be read from" in child(tmp_path / "data").stderr


def test_an_error_names_the_partition(client):
    data = from_dask(frame(), client=client)
    data._source._keys[1], data._source._timeout = "no-such-key", 5.0  # enough for the others on a busy host
    with pytest.raises(tf.errors.OpError, match="partition 2 of the Dask DataFrame cannot be read"):
        list(data.dataset(20, features="id"))
    data.close()
