"""The state of compression: made where it is missing, saved and restored, shared out over other numbers of replicas."""

import numpy as np
import pytest
import tensorflow as tf

from tfdist.collectives import CompressionState
from tfdist.collectives.compression_state import redistribute
from tfdist.compression import ErrorFeedback, MomentumCorrection, PowerSGD, Quantize, TopK, WarmUp

pytestmark = pytest.mark.usefixtures("cpus")
SHAPE = (6, 5)
LOW_RANK = WarmUp(ErrorFeedback(PowerSGD(2)), 10)
MOMENTUM = MomentumCorrection(TopK(0.1))
PATHS = {"block.1/dense/kernel": LOW_RANK, "odd.S/name..x/kernel_1": MOMENTUM}


def filled(numbers, size, seed=0):
    """A state of the replicas `numbers` of `size` with whole numbers in it, whose float32 sums are exact."""
    state = CompressionState()
    state.num_replicas = size
    for number in numbers:
        random = np.random.default_rng(seed + number)
        replica = state.replica_state(number, "CPU:0")
        for path, compressor in PATHS.items():
            for name, variable in replica.of(path, compressor, SHAPE).items():
                if name in ("residual", "velocity"):
                    variable.assign(random.integers(-1000, 1000, size=SHAPE).astype("float32"))
                elif name == "factor":
                    variable.assign(np.full((5, 2), 0.5, "float32"))
                else:
                    variable.assign(7)
    return state


def values_of(state):
    return {
        int(name.removeprefix("replica_")): {
            path: {entry: variable.numpy() for entry, variable in entries.items()}
            for path, entries in replica.entries.items()
        }
        for name, replica in state.replicas.items()
    }


def made(numbers, size):
    state = CompressionState()
    state.num_replicas = size
    for number in numbers:
        state.replica_state(number, "CPU:0")
    return state


def use(state):
    """As the first step does."""
    for replica in state.replicas.values():
        for path, compressor in PATHS.items():
            replica.of(path, compressor, SHAPE)


def test_variables_are_made_once_and_start_with_the_initial_state():
    replica = CompressionState().replica_state(0, "CPU:0")
    first = replica.of("kernel", LOW_RANK, SHAPE)
    assert {name: variable.shape for name, variable in first.items()} == {
        "warm_up_steps": (),
        "residual": SHAPE,
        "factor": (5, 2),
    }
    np.testing.assert_array_equal(first["factor"], LOW_RANK.initial_state(SHAPE)["factor"])
    second = replica.of("kernel", LOW_RANK, SHAPE)
    assert all(second[name] is variable for name, variable in first.items())
    assert not set(replica.of("kernel", ErrorFeedback(Quantize(8)), SHAPE)) - {"residual"}


def test_variables_are_made_outside_of_the_function_that_asks_for_them():
    replica = CompressionState().replica_state(0, "CPU:0")

    @tf.function
    def step():
        replica.of("kernel", LOW_RANK, SHAPE)["residual"].assign_add(tf.ones(SHAPE))

    step()
    step()
    np.testing.assert_array_equal(replica.entries["kernel"]["residual"], np.full(SHAPE, 2.0))


@pytest.mark.parametrize("restore_first", [True, False], ids=["before the first step", "after it"])
def test_a_checkpoint_restores_all_entries(restore_first, tmp_path):
    saved = filled([0, 1], 2)
    prefix = tf.train.Checkpoint(compression=saved).save(tmp_path / "state")
    other = made([0, 1], 2)
    if not restore_first:
        use(other)
    status = tf.train.Checkpoint(compression=other).restore(prefix)
    use(other)
    status.assert_existing_objects_matched()
    np.testing.assert_equal(values_of(other), values_of(saved))


def test_a_checkpoint_restores_also_replicas_that_are_made_after_it(tmp_path):
    saved = filled([0, 1], 2)
    prefix = tf.train.Checkpoint(compression=saved).save(tmp_path / "state")
    other = CompressionState()
    tf.train.Checkpoint(compression=other).restore(prefix)
    for number in (0, 1):
        other.replica_state(number, "CPU:0")
    use(other)
    np.testing.assert_equal(values_of(other), values_of(saved))


@pytest.mark.parametrize("when", ["before there are replicas", "before the first step", "after it"])
@pytest.mark.parametrize(("old", "new"), [(2, 3), (3, 2), (4, 1), (1, 4), (2, 2)])
def test_another_number_of_workers_keeps_the_sum_of_residuals(old, new, when, tmp_path):
    saved = [filled([worker], old) for worker in range(old)]
    prefixes = [
        tf.train.Checkpoint(compression=state).save(tmp_path / f"rank-{worker}" / "state")
        for worker, state in enumerate(saved)
    ]
    restored = [made([] if when == "before there are replicas" else [worker], new) for worker in range(new)]
    for worker, state in enumerate(restored):
        if when == "after it":
            use(state)
        state.restore(prefixes)
        state.replica_state(worker, "CPU:0")
        use(state)
    before = [values_of(state)[worker] for worker, state in enumerate(saved)]
    after = [values_of(state)[worker] for worker, state in enumerate(restored)]
    for path in PATHS:
        for name in before[0][path]:
            ours = [replica[path][name] for replica in after]
            if name in ("residual", "velocity"):
                np.testing.assert_array_equal(np.sum(ours, axis=0), np.sum([r[path][name] for r in before], axis=0))
            else:
                for value in ours:
                    np.testing.assert_array_equal(value, before[0][path][name])
    if old == new:
        np.testing.assert_equal(after, before)


def test_shares_are_spread_over_the_replicas():
    saved = {number: {"kernel": {"residual": tf.constant([2.0**number])}} for number in range(5)}
    shares = [float(redistribute(number, 2, saved)["kernel"]["residual"][0]) for number in range(2)]
    assert shares == [1 + 4 + 16, 2 + 8]


def test_a_variable_that_only_one_replica_knows_is_not_lost():
    saved = {0: {}, 1: {"rows": {"residual": tf.constant([3.0])}}}
    assert [redistribute(number, 2, saved) for number in range(2)][1]["rows"]["residual"].numpy().tolist() == [3.0]
    assert float(redistribute(0, 1, saved)["rows"]["residual"][0]) == 3.0


def test_checkpoints_of_two_steps_of_one_worker_are_refused(tmp_path):
    prefixes = [tf.train.Checkpoint(compression=filled([0], 2)).save(tmp_path / f"{i}/state") for i in range(2)]
    with pytest.raises(ValueError, match=r"hold the state of replica 0\. Received: .*state-1.*one checkpoint of each"):
        made([0], 2).restore(prefixes)


def test_a_checkpoint_without_compression_is_refused(tmp_path):
    prefix = tf.train.Checkpoint(step=tf.Variable(1)).save(tmp_path / "state")
    with pytest.raises(ValueError, match=r"no compression state\. Received: .*state-1.*compression=strategy"):
        made([0], 1).restore([prefix])


def test_a_state_moves_to_the_device_of_its_variable():
    replica = CompressionState(devices=["CPU:0", "CPU:1"]).replica_state(0, "CPU:0")
    residual = replica.of("kernel", MOMENTUM, SHAPE)["residual"]
    residual.assign(np.ones(SHAPE))
    device = residual.device.replace("CPU:0", "CPU:2")
    moved = replica.of("kernel", MOMENTUM, SHAPE, device)["residual"]
    assert moved.device == device and moved.numpy().min() == 1.0
    assert replica.of("kernel", MOMENTUM, SHAPE, device)["residual"] is moved
    assert replica.of("kernel", MOMENTUM, SHAPE)["residual"] is moved
