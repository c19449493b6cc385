"""Ray on this machine, for tests."""

import contextlib
import tempfile

import pytest
from engine_runs import engine_environment


def require_ray():
    """Skips a test, or a module, where Ray is missing; returns the package."""
    pytest.importorskip("psutil")
    return pytest.importorskip("ray", reason="needs the extra `ray`")


@contextlib.contextmanager
def ray_directory():
    """Variables that give Ray a directory with a short name: its sockets are in it, with paths of at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as directory:
        yield {"RAY_TMPDIR": directory}


@contextlib.contextmanager
def local_ray(temporary):
    """Ray with two cores."""
    ray = require_ray()
    with (
        ray_directory() as variables,
        engine_environment(temporary, RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0", **variables),
    ):
        ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80_000_000, logging_level="warning")
        try:
            yield ray
        finally:
            ray.shutdown()
