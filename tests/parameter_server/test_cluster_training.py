"""Trains on a cluster: `Synchronous` equals one process, `Asynchronous` loses no update, bytes are counted."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from cluster_cases import LONG_PARITY, PARITY
from cluster_runs import run_chief
from exchange_model import SHAPES, policy

from tfdist.compression import Policy

pytestmark = [pytest.mark.multi_process, pytest.mark.slow, pytest.mark.usefixtures("cpus")]

ROUNDS = ["momentum_2", "adam_1"]
OWN = (
    "all_losses_of_pushes all_losses_of_rounds batch_normalization bfloat16_pull custom_train_step "
    "data_sets_of_workers dict_inputs no_staleness_is_one_process optimizer_features own_loop sources "
    "table_in_two_parts"
).split()
OTHERS = (
    "callbacks data_sets_that_cannot_be mixed_float16 nothing_is_lost bounded_staleness constraints_and_overflow "
    "error_of_a_worker error_while_tracing asynchronous_pushes synchronous_pushes methods_train counted_bytes "
    "placement rows_of_a_table saved"
).split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ps")


@pytest.fixture(scope="module")
def results(folder):
    """What all cases return on two workers and two servers."""
    return run_chief("on_cluster_cases.py", folder, *ROUNDS, *PARITY, *OWN, *OTHERS, servers=2)


@pytest.fixture(scope="module")
def results_of_one_server(tmp_path_factory):
    return run_chief("on_cluster_cases.py", tmp_path_factory.mktemp("ps"), *ROUNDS, *LONG_PARITY, servers=1)


@pytest.fixture
def found(results):
    """`found(name)`: what a case has returned."""

    def of(name):
        assert "error" not in results[name], results[name]["error"]
        return results[name]

    return of


# Sums of two parts are rounded differently from sums over a batch: by a few units in the last place of float32, 1.2e-7,
# in 20 updates. In `PARITY` some sums are longer, and some differences are relative to small sums.
@pytest.mark.parametrize("name", ROUNDS + OWN)
def test_equal_to_one_process(found, name):
    assert found(name)["difference"] <= 1e-6


@pytest.mark.parametrize("name", PARITY)
def test_equal_to_one_process_as_replicas_are(found, name):
    assert found(name)["difference"] <= 5e-6


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "tolerance"), [(name, 1e-6) for name in ROUNDS] + [(name, 5e-6) for name in LONG_PARITY]
)
def test_one_server_is_equal_to_one_process(results_of_one_server, name, tolerance):
    result = results_of_one_server[name]
    assert result.get("difference", 1.0) <= tolerance, result


def test_callbacks_are_called_as_in_one_process(found):
    called = found("callbacks")
    assert called["same"] and called["difference"] <= 1e-6
    assert called["order"].count("on_epoch_end 1") == 1 and "on_epoch_begin 2" not in called["order"]  # it has stopped


def test_mixed_precision_overflows_learns_and_scales(found):
    (updates, scale, *losses), (_, _, *expected) = found("mixed_float16")["found"]
    assert 10 <= updates < 20 and scale < 2**20
    np.testing.assert_allclose(losses, expected, rtol=0.1)  # a part may overflow where the complete batch does not


def test_wrong_data_sets_of_workers(found):
    ends, is_none = found("data_sets_that_cannot_be")["messages"]
    assert ends.startswith("A worker's dataset is finite. Received: cardinality 5. Expected: an infinite one")
    assert ".repeat()" in ends and "steps_per_epoch" in ends
    assert is_none.startswith("`dataset_fn` does not return a dataset. Received: int. Expected: a tf.data.Dataset")


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


PUSHES = pytest.mark.parametrize("name", ["asynchronous_pushes", "synchronous_pushes"])


@PUSHES
@pytest.mark.parametrize("variable", SHAPES)
def test_decoded_gradients_and_residuals_are_all_gradients(found, name, variable):
    seen = found(name)
    if variable == "bf16":  # rounded, without a residual
        assert 1e-5 < seen["off"][variable] < 2**-7 and not seen["kept"][variable]
    elif variable == "bias":  # too small to be encoded
        assert seen["off"][variable] < 1e-6 and not seen["kept"][variable]
    else:
        assert seen["off"][variable] < 1e-6
        assert len(seen["kept"][variable]) == 2 and min(seen["kept"][variable]) > 1e-4


@PUSHES
def test_pushed_bytes_are_those_of_the_payloads(found, name):
    rules, seen = policy(), found(name)
    assert seen["steps"] == (24 if name.startswith("sync") else 12)
    assert seen["bytes"] == seen["steps"] * sum(_bytes(rules, name, shape) for name, shape in SHAPES.items())


def test_a_loss_without_normalizers_costs_the_chief_nothing(found):
    assert found("synchronous_pushes")["normalizers"] == 0


def _bytes(rules, path, shape):
    compressor, is_encoded = rules.resolve(path, shape)
    return compressor.payload_bytes(shape) if is_encoded else 4 * int(np.prod(shape))


@pytest.mark.parametrize("method", ["int8", "sign", "topk", "powersgd"])
def test_methods_train(found, method):
    first, last = found("methods_train")[method]
    assert last < first / 10


def test_counted_bytes_of_pushes_and_pulls(found):
    seen, shapes = found("counted_bytes"), [(6, 16), (16,), (16, 3), (3,)]
    dense = 4 * sum(int(np.prod(shape)) for shape in shapes)
    rest = 8  # the count of updates and the learning rate
    int4 = sum(_bytes(Policy("int4", dense_below=0), "", shape) for shape in shapes)
    assert int4 < 0.6 * dense
    assert seen["dense"] == [dense, dense + rest]
    assert seen["bf16"] == [dense, dense / 2 + rest]
    assert seen["int4"] == [int4, dense + rest]


def test_communication_counts_the_pushes_and_updates_of_all_workers(found):
    """Each asynchronous push is an update; a round of two workers makes one update of two pushes."""
    asynchronous, steps = found("counted_bytes")["communication"], found("counted_bytes")["steps"]
    assert (asynchronous["gradient_collectives"], asynchronous["updates"]) == (steps, steps)
    assert asynchronous["wire_bytes"] == asynchronous["gradient_bytes"] == steps * found("counted_bytes")["int4"][0]
    rounds = found("mixed_float16")["communication"]
    assert (rounds["gradient_collectives"], rounds["updates"], rounds["other_collectives"]) == (40, 20, 0)


def test_variables_are_placed_by_bytes_with_their_optimizer_state(found):
    seen = found("placement")
    assert (seen["server_bytes"], seen["optimizer_bytes"]) == (seen["by_server"], seen["by_server_of_optimizer"])
    assert abs(seen["by_server"][0] - seen["by_server"][1]) <= seen["largest"]
    assert seen["jobs"] == ["/job:ps"]
    assert len(seen["beside"]) == 8 and all(seen["beside"])


def test_only_rows_of_a_table_cross_the_network(found):
    seen = found("rows_of_a_table")
    rows, dense, rest = 3 * 8 * 4, 24 * 4, 8
    assert seen["pulled"] == rows + dense + rest
    assert seen["pushed"] == rows + 3 * 4 + dense
    assert seen["shapes"] == [[5000, 8], [5000, 8]]
    assert len(set(seen["servers"])) == 2


def test_a_plain_process_loads_what_was_saved(found, folder):
    seen = found("saved")
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
