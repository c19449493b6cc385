"""Workers that train by themselves between two exchanges, of which some are lost and some join."""

from pathlib import Path

import local_fits
import numpy as np
import pytest
from launched_runs import launch, launch_once
from on_workers_elastic_fits import FAULTS

pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("cpus")]
_SCRIPT = Path(__file__).with_name("on_workers_elastic_fits.py")
_TOLERANCE = 5e-7  # 320 updates and 128 exchanges of float32; weights, losses and errors are below 1


def _assert_equal_bits(run, name, ranks=range(3)):
    first, *others = (run.arrays(f"{name}-{rank}.npz") for rank in ranks)
    for key, values in first.items():
        for other in others:
            np.testing.assert_array_equal(other[key], values, key)
    return first


def _assert_same_as_reference(run, name, ranks=range(3)):
    """Compares weights and logs with what NumPy computes for the workers that have made the steps."""
    got = _assert_equal_bits(run, name, ranks)
    reference = local_fits.Reference(run.path(name), local_fits.STRATEGY_OPTIONS[name]["mode"])
    for key, values in reference.train().items():
        np.testing.assert_allclose(got[key], values, rtol=0, atol=_TOLERANCE, err_msg=key)
    assert got["steps"] == local_fits.EPOCHS * local_fits.STEPS, "a worker that joins counts the steps it repeats"
    return reference


def test_what_a_lost_worker_has_trained_since_the_last_exchange_is_lost_and_nothing_else(tmp_path_factory):
    options = ["--workers", "3", "--elastic", "1", "--max-restarts", "1"]
    run = launch_once(tmp_path_factory, "elastic fits", _SCRIPT, options=options)
    reference = _assert_same_as_reference(run, "diloco", ranks=(1, 2))
    ((rank, step, _),) = FAULTS["diloco"]
    assert rank in reference.members[step]
    assert rank not in reference.members[step + 1], "the step needs an exchange, so the others compute it again"
    assert reference.lost_with_samples == 1


@pytest.mark.long
@pytest.mark.parametrize("name", ["diloco", "local_sgd", "local_compressed"])
def test_losses_and_joins_on_two_devices_a_worker(tmp_path, name):
    run = launch(tmp_path, _SCRIPT, name, options=["--workers", "3", "--elastic", "1"]).assert_complete()
    faults = len(FAULTS[name])
    assert f"{faults} worker{'s' * (faults > 1)} lost, {faults} joined" in run.output, run.output[-3000:]
    if name == "local_compressed":
        _assert_equal_bits(run, name)
    else:
        assert _assert_same_as_reference(run, name).lost_with_samples == faults
