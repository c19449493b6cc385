"""The run that all engines are compared with."""

import pytest
from engine_runs import OPTIONS, SCRIPT
from launched_runs import launch_once

pytest.register_assert_rewrite("engine_contract")


@pytest.fixture(scope="session")
def reference(tmp_path_factory):
    """The weights of `tfdist run`."""
    run = launch_once(tmp_path_factory, "the engines' reference", SCRIPT, options=OPTIONS).assert_complete()
    return list(run.arrays("worker-0.npz").values())
