"""Federated averaging on two workers and two servers, against NumPy and against one process; arguments; the choice."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.compression import Policy
from tfdist.parameter_server.client_training import ClientInfo
from tfdist.parameter_server.federated_chief import ClientEncoder
from tfdist.parameter_server.modes import FederatedAveraging, chosen_clients

on_cluster = [pytest.mark.multi_process, pytest.mark.slow, pytest.mark.usefixtures("cpus")]


class TestOnCluster:
    pytestmark = on_cluster

    # float32 against float64; relative to the largest weight. A round adds a few roundings of 6e-8.
    def test_federated_averaging_is_that_of_numpy(self, found):
        seen = found("federated_averaging")
        assert seen["difference"] <= 1e-6 and seen["loss"] <= 1e-6
        assert seen["moved"] > 0.5
        assert seen["updates"] == 4
        assert seen["counted"] == sum(seen["samples"]) == 4 * 3 * (4 * 8 + 12)

    # Adam divides by the root of a mean of squares, which enlarges differences where that is small.
    def test_adam_of_some_clients_with_proximal_term_and_clipping_is_that_of_numpy(self, found):
        seen = found("federated_adam_of_some_clients")
        assert seen["difference"] <= 2e-5 and seen["loss"] <= 1e-5
        assert seen["moved"] > 0.3
        assert seen["counted"] == sum(seen["samples"])

    def test_single_steps_of_all_clients_are_those_of_one_process(self, found):
        seen = found("federated_single_steps_are_one_process")
        assert seen["difference"] <= 1e-6 and seen["loss"] <= 1e-6
        assert seen["evaluation"] <= 1e-6 and seen["prediction"] <= 2e-6

    def test_layers_with_state_schedules_and_compression(self, found):
        seen = found("federated_with_everything")
        first, last = seen["loss"]
        assert seen["finite"] and last < 0.5 * first and seen["validation"][-1] > 0.9
        assert (seen["rounds"], seen["updates"], seen["pushes"]) == (40, 40, 120)
        assert seen["bytes_of_a_push"] < 0.45 * seen["dense_bytes"]  # small variables are sent as they are
        assert seen["statistics_moved"] > 0.01
        assert seen["slots"] == 0.0  # a client's moments are not on the servers

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("arrays", "Clients train on their own data. Received: tuple. Expected: `fit(strategy.distribute_datasets"),
            ("another", "These are the data of another strategy or mode. Received: data of 2 clients."),
            ("empty", "The dataset of a client is empty. Received: no batch of client 1."),
            ("unequal", "The clients' datasets differ. Received: elements TensorSpec(shape=(), dtype=tf.int64"),
            ("ema", "A client's average of weights ends with the round."),
            (
                "accumulation",
                "A client updates its own weights after every batch. Received: an optimizer",
            ),
            ("xla", "Clients do not compile their steps by XLA."),
            ("half", "A loss scale would start again in every round."),
            ("two optimizers", "A client updates by the model's optimizer alone."),
            ("nan", "Too few clients have finite weights after a round. Received: 0 of 5 clients."),
            ("validation", "Datasets that are created on the workers can only be used for training."),
            ("loop", "The data of clients can only be used by `fit`."),
        ],
    )
    def test_what_clients_cannot_train_is_an_error(self, found, name, message):
        seen = found("federated_errors")
        assert message in seen[name]
        assert 0 < seen["loss afterwards"] < 5


def test_the_residual_of_each_client_is_its_own():
    """And one of a difference that does not count stays as it was."""
    encoder = ClientEncoder(Policy("topk:0.05", dense_below=0), tf.Variable, slots=3)
    encoder.prepare(["kernel"], [tf.TensorShape([10, 20])])
    gradient = tf.reshape(tf.range(200.0), [10, 20])

    def encode(slot, counts):
        encoder.slot, encoder.counts = tf.constant(slot, tf.int64), tf.constant(counts)
        sent, _ = encoder.encode(gradient, "kernel")
        return sent.decode(sent.tensors).numpy()

    def states():
        encoder.slot = tf.range(3, dtype=tf.int64)
        return {name: value.numpy() for name, value in encoder.read_state("kernel").items()}

    first = encode(1, True)
    [residual] = [value for value in states().values() if value.shape[1:] == (10, 20)]
    np.testing.assert_allclose(residual[1], gradient - first, atol=1e-4)
    assert not residual[0].any() and not residual[2].any()
    before = states()
    encode(1, False)
    encode(0, False)
    for name, value in states().items():
        np.testing.assert_array_equal(value, before[name])


REJECTED = [
    ({"local_steps": 0}, "Invalid `local_steps`. Received: local_steps=0."),
    ({"clients": 0}, "Invalid `clients`."),
    ({"clients_per_round": 1.5}, "Invalid `clients_per_round`."),
    ({"min_clients": 0}, "Invalid `min_clients`."),
    ({"proximal": -1.0}, "Invalid `proximal`. Received: -1.0."),
    ({"clip_difference": 0}, "Invalid `clip_difference`. Received: 0."),
    ({"deadline_seconds": float("inf")}, "Invalid `deadline_seconds`. Received: inf."),
    ({"server_optimizer": "sdg"}, "Invalid `server_optimizer`. Received: 'sdg'."),
    ({"server_optimizer": 3}, "Invalid `server_optimizer`. Received: 3."),
]


@pytest.mark.parametrize(("arguments", "message"), REJECTED)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError) as error:
        FederatedAveraging(**{"local_steps": 1, **arguments})
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("optimizer", "named"),
    [
        (lambda: keras.optimizers.Adam(use_ema=True), "use_ema"),
        (lambda: keras.optimizers.SGD(gradient_accumulation_steps=2), "gradient_accumulation_steps"),
        (lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), "LossScaleOptimizer"),
    ],
)
def test_the_servers_update_plainly(optimizer, named):
    with pytest.raises(ValueError, match=f"one plain update a round. Received: a `server_optimizer` with {named}"):
        FederatedAveraging(1, server_optimizer=optimizer())


def test_numbers_of_clients_that_cannot_be():
    FederatedAveraging(1).check_clients(3)
    for mode in (FederatedAveraging(1, min_clients=4), FederatedAveraging(1, clients=4, clients_per_round=5)):
        with pytest.raises(ValueError, match="A round would never be complete"):
            mode.check_clients(3)
    with pytest.raises(ValueError, match="Received: clients=2 with 3 workers. Expected: at least as many clients"):
        FederatedAveraging(1, clients=2).check_clients(3)


def test_the_server_optimizer_is_made_from_its_configuration():
    mode = FederatedAveraging(1, server_optimizer=keras.optimizers.Adam(0.03, beta_2=0.9))
    one, other = mode.new_server_optimizer(), mode.new_server_optimizer()
    assert one is not other and one.beta_2 == 0.9
    assert float(one.learning_rate.numpy()) == pytest.approx(0.03)
    assert float(FederatedAveraging(1).new_server_optimizer().learning_rate.numpy()) == 1.0


def test_the_choice_is_random_and_repeatable():
    chosen = [chosen_clients(1, number, 10, range(10), 4) for number in range(200)]
    assert chosen == [chosen_clients(1, number, 10, range(10), 4) for number in range(200)]
    counts = np.bincount(np.concatenate(chosen), minlength=10)
    assert counts.sum() == 800 and counts.min() > 50  # 80 each on average, with a deviation of 7
    assert all(len(set(of_round)) == 4 for of_round in chosen)
    assert chosen_clients(1, 0, 10, [9], 4) == [9]


def test_a_client_is_told_its_part():
    told = ClientInfo.unpack(ClientInfo(2**40, 3, 1, 2).pack())
    assert [int(value) for value in (told.round, told.client, told.slot, told.buffer)] == [2**40, 3, 1, 2]
