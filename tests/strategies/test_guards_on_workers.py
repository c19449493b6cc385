"""Two workers take back the same steps, and name a device whose weights or gradients differ."""

import numpy as np
import on_workers_guards
import pytest

from tfdist.strategies import MirroredStrategy

pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("cpus")]
# 11 updates of Adam by sums of four parts in another order.
_TOLERANCE = 1e-6


@pytest.fixture
def seen(workers_of_two_devices):
    """What each rank has observed."""
    return [workers_of_two_devices.json(f"seen-{rank}.json")["guards"] for rank in range(2)]


@pytest.mark.parametrize("steps", [1, 5])
def test_a_step_that_jumps_is_taken_back_on_all_workers(seen, cpus, steps):
    first, second = (rank[f"{steps} steps"] for rank in seen)
    assert first == second
    assert first["spikes"] == [[on_workers_guards.SPIKE, "loss"]]
    good = [batch for batch in range(on_workers_guards.BATCHES) if batch != on_workers_guards.SPIKE]
    for got, expected in zip(first["weights"], on_workers_guards.fit(MirroredStrategy(cpus[:1]), good), strict=True):
        np.testing.assert_allclose(got, expected, rtol=0, atol=_TOLERANCE)


@pytest.mark.parametrize(("steps", "comparisons"), [(1, 3), (5, 3)])
def test_equal_workers_pass(seen, steps, comparisons):
    assert [rank[f"{steps} steps"]["comparisons"] for rank in seen] == [comparisons] * 2


def test_a_device_with_other_bits_is_named_on_all_workers(seen):
    for rank in seen:
        assert rank["ranks"] == [1]
        assert (
            "worker 1, device 1: sequential" in rank["error"] and "/kernel; of 4 replicas after step 4" in rank["error"]
        )
    assert seen[0]["error"] == seen[1]["error"]


def test_a_device_with_wrong_gradients_is_named_on_all_workers(seen):
    for rank in seen:
        assert rank["gradient ranks"] == [1]
        assert "other gradients than the majority. Received: worker 1, device 1: loss" in rank["gradient error"]
        assert "of 8 computations of 4 replicas after step 4" in rank["gradient error"]
    assert seen[0]["gradient error"] == seen[1]["gradient error"]
