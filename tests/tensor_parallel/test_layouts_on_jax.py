"""A layout map that was written for `keras.distribution.ModelParallel` on JAX gives the same weights here."""

import os
import subprocess
from pathlib import Path

import keras
import layouts_on_jax as program
import numpy as np
import pytest
from child_environment import child_environment

from tfdist.keras_internals.placed_variables import held_variable
from tfdist.strategies import ModelParallelStrategy, Pipeline
from tfdist.tensor_parallel.split_variable import SplitVariable

PYTHON = os.environ.get("JAX_PYTHON")
pytestmark = [
    pytest.mark.long,
    pytest.mark.usefixtures("cpus"),
    pytest.mark.skipif(not PYTHON, reason="JAX_PYTHON does not name a Python with Keras and JAX"),
]


@pytest.mark.parametrize(("batch", "ways"), [(1, 2), (2, 2)])
def test_an_unchanged_layout_map(batch: int, ways: int, tmp_path: Path) -> None:
    """After 20 steps of SGD, up to rounding: JAX and TensorFlow add in other orders."""
    layout = program.layout_of([f"cpu:{index}" for index in range(batch * ways)], batch, ways)
    devices = [f"CPU:{index}" for index in range(batch * ways)]
    pipeline = Pipeline(stages=1, micro_batches=1)
    with ModelParallelStrategy(devices, pipeline=pipeline, data_parallel=batch, layout_map=layout).scope():
        keras.utils.set_random_seed(1)
        model = program.compiled_model()
    weights = [variable.numpy() for variable in model.weights]
    before = {"weights": tmp_path / "weights.npz", "learned": tmp_path / "learned.npz"}
    np.savez(before["weights"], *weights)
    environ = child_environment(
        KERAS_BACKEND="jax", XLA_FLAGS=f"--xla_force_host_platform_device_count={batch * ways}", JAX_PLATFORMS="cpu"
    )
    environ.pop("PYTHONPATH", None)
    command = [str(PYTHON), program.__file__, *map(str, before.values()), str(batch), str(ways)]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr
    logs = program.trained(model, weights)
    with np.load(before["learned"]) as learned:
        assert int(learned["devices"]) == batch * ways
        split = [one.path for one in model.weights if isinstance(held_variable(one), SplitVariable)]
        assert split == learned["split"].tolist() and len(split) == 22
        for index, variable in enumerate(model.weights):
            np.testing.assert_allclose(variable.numpy(), learned[str(index)], atol=1e-5, err_msg=variable.path)
        np.testing.assert_allclose(logs, learned["logs"], atol=1e-5)
        changed = max(np.abs(learned[str(index)] - one).max() for index, one in enumerate(weights))
    assert changed > 1e-2
