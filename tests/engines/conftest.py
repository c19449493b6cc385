"""The run that all engines are compared with."""

import pytest
from engine_runs import weights_of_run


@pytest.fixture(scope="session")
def reference(tmp_path_factory):
    """The weights of `tfdist run`."""
    return weights_of_run(tmp_path_factory.mktemp("reference"), "worker-0.npz")
