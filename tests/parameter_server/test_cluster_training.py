"""Trains on a cluster: `Synchronous` equals one process, `Asynchronous` loses no update."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from cluster_cases import CONTAINED, LONG_PARITY, LONG_ROUNDS, OWN, PARITY, ROUNDS
from cluster_runs import launch_chief

pytestmark = [pytest.mark.multi_process, pytest.mark.slow, pytest.mark.usefixtures("cpus")]
LONG = pytest.mark.long


@pytest.fixture(scope="module")
def results_of_one_server(tmp_path_factory):
    names = ROUNDS + LONG_ROUNDS + LONG_PARITY
    return launch_chief(tmp_path_factory.mktemp("ps"), "on_cluster_cases.py", *names).json("results.json")


def test_the_run_ends_without_an_error(cluster):
    cluster.assert_complete()


# Sums of two parts are rounded differently from sums over a batch: by a few units in the last place of float32, 1.2e-7,
# in 20 updates. In `PARITY` some sums are longer, and some differences are relative to small sums.
@pytest.mark.parametrize("name", [pytest.param(name, marks=[LONG] * (name in CONTAINED)) for name in ROUNDS + OWN])
def test_equal_to_one_process(found, name):
    assert found(name)["difference"] <= 1e-6


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[LONG, pytest.mark.version_matrix] if name in CONTAINED else []) for name in PARITY],
)
def test_equal_to_one_process_as_replicas_are(found, name):
    assert found(name)["difference"] <= 5e-6


@LONG
@pytest.mark.parametrize(
    ("name", "tolerance"), [(name, 1e-6) for name in ROUNDS + LONG_ROUNDS] + [(name, 5e-6) for name in LONG_PARITY]
)
def test_one_server_is_equal_to_one_process(results_of_one_server, name, tolerance):
    result = results_of_one_server[name]
    assert result.get("difference", 1.0) <= tolerance, result


def test_parts_of_other_sizes_equal_one_process_and_are_computed_by_their_workers(found):
    seen = found("moving_parts")
    assert seen["difference"] <= 1e-6
    assert seen["rounds"] == 20
    assert sum(seen["samples"]) == sum(seen["expected"]) == 2 * 203
    # TensorFlow gives the first function of each worker to any of them.
    assert abs(seen["samples"][0] - seen["expected"][0]) <= 0.3 * 203


def test_updates_that_depend_on_each_other_in_ways_that_cannot_be_computed(found):
    messages = found("dependent_updates_that_cannot_be")["messages"]
    expected = [
        "A step calls a function that reads variables, before and after an update of them",
        "A step reads a variable within a condition, a loop or a nested function, and later another value of it that "
        "an update has made",
        "A step reads variables that it has updated before, so that a round has several phases, in each of which "
        "workers would draw other batches",
        "A step reads variables that it has updated before, while gradients of several batches are accumulated",
    ]
    assert [message in seen for message, seen in zip(expected, messages, strict=True)] == [True] * 4, messages


def test_callbacks_are_called_as_in_one_process(found):
    called = found("callbacks")
    assert called["same"] and called["difference"] <= 1e-6
    assert called["order"].count("on_epoch_end 1") == 1 and "on_epoch_begin 2" not in called["order"]  # it has stopped


def test_xla_compiles_the_workers_layers(found):
    """XLA adds in another order: 8 updates of rate 0.01 change float32 weights below 1 by less than this."""
    seen = found("compiled_by_xla")
    assert seen["difference"] <= 1e-5
    assert seen["calls"] >= 4  # pooling, dense, the normalization, the inner model, the loss; not the model with rows


def test_mixed_precision_overflows_learns_and_scales(found):
    (updates, scale, *losses), (_, _, *expected) = found("mixed_float16")["found"]
    assert 10 <= updates < 20 and scale < 2**20
    np.testing.assert_allclose(losses, expected, rtol=0.1)  # a part may overflow where the complete batch does not


def test_wrong_data_sets_of_workers(found):
    ends, is_none = found("data_sets_that_cannot_be")["messages"]
    assert ends.startswith("A worker's dataset is finite. Received: cardinality 5. Expected: an infinite one")
    assert ".repeat()" in ends and "steps_per_epoch" in ends
    assert is_none.startswith("`dataset_fn` does not return a dataset. Received: int. Expected: a tf.data.Dataset")


def test_the_loop_of_tensorflows_tutorial_makes_every_step(found):
    seen = found("tutorial")
    assert (seen["updates"], seen["samples"]) == (40, 40 * 20)
    assert np.mean(seen["losses"][-5:]) < 0.9 * np.mean(seen["losses"][:5])
    assert seen["rows"] == 4 * 200


def test_a_loop_checks_and_unscales_scaled_gradients(found):
    seen = found("loop_with_a_loss_scale")
    np.testing.assert_allclose(seen["servers"], seen["one process"], rtol=1e-6)
    updates, scale = seen["servers"][-2:]
    assert 0 < updates < 8 and scale == 2.0 ** (126 - (8 - updates))
    assert "an optimizer with gradient_accumulation_steps=2 in a custom training loop. Expected" in seen["message"]


def test_a_partitioner_splits_plain_variables_over_the_servers(found):
    seen = found("partitioned_variables")
    assert seen["shards"] == [[3, 2], [2, 2]] and seen["servers"] == ["0", "1"]
    assert seen["is_equal"] and seen["scalar"] == 1.0 and seen["rows"] == [[8.0, 9.0], [0.0, 1.0]]
    assert seen["weights"] == [[6, 16], [16], [16, 3], [3]]
    assert "variable_partitioner must return a list/tuple whose elements are 1" in seen["message"]
    values = np.arange(10.0).reshape(5, 2)
    for created, expected in zip(seen["created"], [values, values, values, values[:, 0]], strict=True):
        np.testing.assert_array_equal(created, expected)
    assert seen["created_shards"] == [[3, 2]] * 4


def test_400_asynchronous_steps_lose_nothing(found):
    seen = found("nothing_is_lost")
    assert (seen["iterations"], seen["samples"], seen["metric"]) == (400, 2000, 2000)
    assert [sum(counts) for counts in zip(*seen["workers"], strict=True)][:2] == [400, 2000]
    assert all(steps > 0 for steps, _, _ in seen["workers"])


def test_every_step_draws_another_dropout_mask(found):
    masks = np.asarray(found("nothing_is_lost")["masks"])
    assert masks.sum() == 400
    # 400 draws yield about 202 of 256 masks; 200 masks drawn twice would yield 139.
    assert np.count_nonzero(masks) > 175


def test_staleness_is_bounded(found):
    seen = found("bounded_staleness")
    assert seen["iterations"] == sum(seen["steps"]) == 102
    assert all(0 <= mean <= largest <= 2 for mean, largest in seen["staleness"])


def test_pushed_updates_are_constrained_and_skipped(found):
    seen = found("constraints_and_overflow")
    assert seen["finite"] and max(seen["norms"]) <= 0.25 * (1 + 1e-5)
    assert (seen["updates"], seen["scale"]) == (19, 2.0**14)


def test_error_of_a_worker_is_raised_once(found):
    [message] = found("error_of_a_worker")["messages"]
    for part in ("a label of the user", "cluster_asynchronous_cases.py", "in train_step"):
        assert part in message
    assert found("error_of_a_worker")["iterations"] == 22


def test_error_while_tracing_shows_the_users_line(found):
    traceback = found("error_while_tracing")["traceback"]
    assert traceback.count('return {"loss": self.no_such_attribute_of_the_user}') == 1
    assert traceback.endswith("has no attribute 'no_such_attribute_of_the_user'\n")


def test_variables_are_placed_by_bytes_with_their_optimizer_state(found):
    seen = found("placement")
    assert (seen["server_bytes"], seen["optimizer_bytes"]) == (seen["by_server"], seen["by_server_of_optimizer"])
    assert abs(seen["by_server"][0] - seen["by_server"][1]) <= seen["largest"]
    assert seen["jobs"] == ["/job:ps"]
    assert len(seen["beside"]) == 8 and all(seen["beside"])


def test_a_plain_process_loads_what_was_saved(cluster, found):
    folder, seen = cluster.folder, found("saved")
    table = keras.models.load_model(folder / "table.keras")
    assert [weight.shape for weight in table.get_weights()][0] == (31, 4)
    np.testing.assert_allclose(table.predict(np.asarray(seen["tokens"]), verbose=0), seen["table"], atol=1e-6)
    assert seen["after_loading"] <= 1e-6

    import cluster_cases

    model = keras.models.load_model(folder / "model.keras")
    np.testing.assert_allclose(model.predict(cluster_cases.INPUTS, verbose=0), seen["outputs"], atol=1e-6)
    evaluation = model.evaluate(cluster_cases.INPUTS, cluster_cases.LABELS, verbose=0)
    np.testing.assert_allclose(evaluation, seen["evaluation"], rtol=1e-5)
    plain = cluster_cases.compiled(tf.distribute.get_strategy(), lambda: keras.optimizers.Adam(0.05))
    plain.optimizer.build(plain.trainable_variables)
    checkpoint = tf.train.Checkpoint(model=plain, optimizer=plain.optimizer)
    checkpoint.read(seen["prefix"]).assert_existing_objects_matched()
    np.testing.assert_allclose(plain.predict(cluster_cases.INPUTS, verbose=0), seen["outputs"], atol=1e-6)
    for loaded in (model, plain):
        for variable, value in zip(loaded.optimizer.variables, seen["momenta"], strict=True):
            np.testing.assert_array_equal(variable.numpy(), value)
