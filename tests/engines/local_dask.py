"""Dask on this machine, for tests."""

import contextlib

import pytest


def require_dask():
    """Skips a test, or a module, where Dask is missing; returns the package."""
    pytest.importorskip("psutil")
    return pytest.importorskip("distributed", reason="needs the extra `dask`")


@contextlib.contextmanager
def cluster_of(workers, **options):
    """Yields a client of so many Dask workers."""
    distributed = require_dask()
    options = {"threads_per_worker": 1, "dashboard_address": ":0", "memory_limit": 0, **options}
    with distributed.LocalCluster(n_workers=workers, **options) as cluster, distributed.Client(cluster) as client:
        yield client
