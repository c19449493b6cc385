"""Gradients are encoded on the way to the servers, and the bytes that the strategy reports are those of the sockets."""

import os

import cluster_byte_cases
import numpy as np
import pytest
from exchange_model import SHAPES, policy

pytestmark = [pytest.mark.multi_process, pytest.mark.slow, pytest.mark.usefixtures("cpus")]

MODES = pytest.mark.parametrize("mode", ["Asynchronous", "Synchronous"])


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


@pytest.fixture
def transferred_bytes(found):
    return found("transferred_bytes")


@pytest.fixture
def on_loopback(transferred_bytes):
    """The same, if no other processes use the loopback of the cluster."""
    if transferred_bytes["namespace"] == os.readlink("/proc/self/ns/net"):
        pytest.skip("no network namespaces on this host: other processes use this loopback, too")
    return transferred_bytes


@MODES
@pytest.mark.parametrize("variant", ["dense", "compressed", "pull"])
def test_reported_bytes_equal_those_of_the_sockets(on_loopback, mode, variant):
    seen = on_loopback[mode][variant]
    assert seen["carried"] / (seen["pushed"] + seen["pulled"]) == pytest.approx(1, abs=0.05)


@MODES
@pytest.mark.parametrize(("variant", "direction"), [("compressed", "pushed"), ("pull", "pulled")])
def test_each_direction_separately(on_loopback, mode, variant, direction):
    dense, less = on_loopback[mode]["dense"], on_loopback[mode][variant]
    assert less["steps"] == dense["steps"]
    saved = dense["carried"] - less["carried"]
    assert saved / (dense[direction] - less[direction]) == pytest.approx(1, abs=0.05)


@MODES
def test_counted_bytes_of_pushes_and_pulls(transferred_bytes, mode):
    seen, shapes = transferred_bytes[mode], cluster_byte_cases.SHAPES
    dense = 4 * sum(int(np.prod(shape)) for shape in shapes)
    rest = 8  # the count of updates and the learning rate
    compressed = sum(_bytes(cluster_byte_cases.policy(mode), "", shape) for shape in shapes)
    assert compressed < 0.26 * dense
    for variant, expected in {
        "dense": [dense, dense + rest],
        "pull": [dense, dense / 2 + rest],
        "compressed": [compressed, dense + rest],
    }.items():
        counted = seen[variant]
        assert [counted["pushed"] / counted["steps"], counted["pulled"] / counted["steps"]] == expected, variant


def test_communication_counts_the_pushes_and_updates_of_all_workers(transferred_bytes, found):
    """Each asynchronous push is an update; a round of two workers makes one update of two pushes."""
    asynchronous = transferred_bytes["Asynchronous"]["compressed"]
    counted, pushed = asynchronous["communication"], asynchronous["pushed"] / asynchronous["steps"]
    assert (counted["gradient_collectives"], counted["updates"]) == (counted["steps"], counted["steps"])
    assert counted["wire_bytes"] == counted["gradient_bytes"] == counted["steps"] * pushed
    rounds = found("mixed_float16")["communication"]
    assert (rounds["gradient_collectives"], rounds["updates"], rounds["other_collectives"]) == (40, 20, 0)


def test_only_rows_of_a_table_cross_the_network(found):
    seen = found("rows_of_a_table")
    rows, dense, rest = 3 * 8 * 4, 24 * 4, 8
    assert seen["pulled"] == rows + dense + rest
    assert seen["pushed"] == rows + 3 * 4 + dense
    assert seen["shapes"] == [[5000, 8], [5000, 8]]
    assert len(set(seen["servers"])) == 2
