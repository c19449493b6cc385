"""MultiWorkerMirroredStrategy on two workers of two devices, and its errors for an invalid environment."""

import json
import math
import socket

import pytest
from child_environment import run_python

from tfdist.utils.cores_and_ports import ReservedPorts

_LIMIT_SECONDS = 1200


@pytest.fixture(scope="module")
def seen(workers_of_two_devices):
    """The observations of each rank of one run."""
    assert workers_of_two_devices.path("chief.keras").exists()
    return [workers_of_two_devices.json(f"seen-{rank}.json") for rank in range(2)]


@pytest.mark.multi_process
class TestOnWorkers:
    def test_the_run_ends_without_an_error(self, workers_of_two_devices):
        workers_of_two_devices.assert_complete()

    def test_ranks_and_all_logical_devices(self, seen):
        assert [(rank["rank"], rank["workers"], rank["replicas"]) for rank in seen] == [(0, 2, 4), (1, 2, 4)]

    def test_an_epoch_sees_every_sample_once_though_no_seed_was_set(self, seen):
        assert sorted(seen[0]["samples"] + seen[1]["samples"]) == list(range(48))
        assert seen[0]["samples"] != list(range(0, 48, 2)), "not shuffled"

    def test_python_code_without_a_seed_draws_the_same_on_all_workers(self, seen):
        for one, other in zip(seen[0]["python_samples"], seen[1]["python_samples"], strict=True):
            assert sorted(one + other) == list(range(48))
            assert one != list(range(0, 48, 2)), "not shuffled"

    def test_a_generator_without_a_seed_is_one_error_on_every_worker(self, seen):
        assert seen[0]["difference"] == seen[1]["difference"]
        assert "Received: x of worker 1 differs from worker 0 in batch 1 of pass 1" in seen[0]["difference"]

    def test_workers_end_with_the_same_weights(self, seen):
        assert seen[0]["digest"] == seen[1]["digest"]
        assert seen[0]["second_digest"] == seen[1]["second_digest"]

    def test_predictions_come_in_the_order_of_the_samples(self, seen):
        # Twelve samples a batch are summed in parts of three: a few units in the last place of numbers around 1.
        assert max(rank["prediction_error"] for rank in seen) < 1e-6

    def test_a_worker_may_trace_alone_and_loops_may_hold_updates(self, seen):
        assert [rank["error_of_different_graphs"] for rank in seen] == [0.0, 0.0]

    def test_one_exchange_an_update(self, seen):
        assert [rank["exchanges_of_an_update"] for rank in seen] == [1, 1]

    def test_a_strategy_cannot_be_copied(self, seen):
        assert all("cannot be deep copied" in rank["error_of_a_copy"] for rank in seen)

    def test_reduce_takes_structures(self, seen):
        assert [rank["reduced"] for rank in seen] == [[4.0, [4.0, 8.0]]] * 2

    def test_an_eager_reduction_fails_if_another_worker_has_ended(self, workers_of_two_devices):
        error = workers_of_two_devices.path("reduced-alone").read_text()
        assert "Worker 0 is lost. Received: it has ended its training, and the others have not" in error

    def test_reduce_does_not_take_a_variable_for_a_shared_result(self, seen):
        assert [rank["reduced_variable"] for rank in seen] == ["rejected", "rejected"]  # as under MirroredStrategy
        assert [rank["sum_over_mean"] for rank in seen] == [4.0, 4.0]

    def test_static_sizes_are_kept_in_a_training_that_resumes_within_an_epoch(self, seen):
        complete, resumed = seen[0]["static_sizes"]
        assert complete == resumed
        assert seen[1]["static_sizes"] == [complete, resumed]

    @pytest.mark.parametrize("case", ["arrays", "full in executions of 3", "without an end"])
    def test_nothing_is_asked_where_all_batches_are_full_and_end_together(self, seen, case):
        for off, asked in (rank["asked_for_batches"][case] for rank in seen):
            assert asked == [[], [], []]  # in fit, evaluate and predict
            assert off < 1e-6

    @pytest.mark.parametrize("case", ["partial in executions of 3", "one row left"])
    def test_one_question_a_batch_where_sizes_differ(self, seen, case):
        for off, asked in (rank["asked_for_batches"][case] for rank in seen):
            # An epoch of 4 steps in executions of 3 asks once more, to find the end.
            draws = 5 if "executions" in case else 4
            assert asked == [[["int64", 2]] * 2 * draws, [["int64", 2]] * draws, [["int64", 2]] * draws]
            assert off < 1e-6

    def test_one_question_a_batch_where_the_end_is_unknown(self, seen):
        for off, asked in (rank["asked_for_batches"]["of unknown number"] for rank in seen):
            assert set(map(tuple, sum(asked, []))) == {("int64", 1)}
            assert off < 1e-6

    def test_all_stop_where_a_callback_stops(self, seen):
        assert [rank["epochs_until_the_stop"] for rank in seen] == [1, 1]


def tf_config(workers, index=0):
    return json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}})


# `attempts` replaces them: by an address that is free, and by one at which nobody can listen.
OWN, ABSENT = "127.0.0.1:own", "127.0.0.1:absent"
ALONE = tf_config([OWN])
NOT_COMPLETE = "TimeoutError: The workers were not complete after {} s"
# TF_CONFIG, arguments, TFDIST_START_TIMEOUT, and parts of the message.
REJECTED = {
    "an address twice": (tf_config(["a:1", "a:1"]), {}, None, ["ValueError", "a:1"]),
    "index": (tf_config(["a:1", "b:2"], 2), {}, None, ["ValueError", "index"]),
    "port": (tf_config(["a", "b:2"]), {}, None, ["ValueError", "port"]),
    **{
        f"timeout {value}": (ALONE, {"start_timeout_seconds": value}, None, ["Invalid `start_timeout_seconds`"])
        for value in (0, -1, math.inf, math.nan, True)
    },
    "missing peer": (
        tf_config([OWN, ABSENT]),
        {"start_timeout_seconds": 1},
        None,
        [NOT_COMPLETE.format(1), f"worker 1 at {ABSENT}", "start_timeout_seconds"],
    ),
    "the launcher's timeout": (tf_config([OWN, ABSENT]), {}, "0.5", [NOT_COMPLETE.format(0.5)]),
}

PROGRAM = """
import json, os, sys
from tensorflow.python.eager import context
from tfdist.strategies import MultiWorkerMirroredStrategy

def attempt(config, arguments, timeout):
    given = {"TF_CONFIG": config, "TFDIST_START_TIMEOUT": timeout}
    os.environ.update({name: value for name, value in given.items() if value})
    try:
        strategy = MultiWorkerMirroredStrategy(**arguments)
        message = f"{strategy.num_workers} {strategy.rank} {strategy.num_replicas_in_sync}"
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    for name in ("TF_CONFIG", "TFDIST_START_TIMEOUT"):
        os.environ.pop(name, None)
    return message, context.context()._initialized

print(json.dumps([attempt(*arguments) for arguments in json.loads(sys.argv[1])]))
"""


@pytest.fixture(scope="module")
def attempts():
    """The outcome of each attempt to create a strategy, in one process, as long as TensorFlow has not started."""
    with socket.create_server(("", 0)) as other, socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        taken, absent = (f"127.0.0.1:{one.getsockname()[1]}" for one in (other, silent))
        with ReservedPorts(1) as reserved:
            own = f"127.0.0.1:{reserved.ports[0]}"
        tried = {name: case[:3] for name, case in REJECTED.items()}
        tried["taken port"] = (tf_config([taken, ABSENT]), {"start_timeout_seconds": 3}, None)
        tried["no cluster"] = (None, {}, None)
        tried["late"] = (ALONE, {}, None)
        wanted = json.dumps(list(tried.values())).replace(OWN, own).replace(ABSENT, absent)
        done = run_python("-c", PROGRAM, wanted, limit_seconds=_LIMIT_SECONDS)
    return taken, dict(zip(tried, json.loads(done.stdout.replace(absent, ABSENT)), strict=True))


@pytest.mark.parametrize("name", REJECTED)
def test_errors_precede_the_start_of_tensorflow(attempts, name):
    message, has_started = attempts[1][name]
    assert all(part in message for part in REJECTED[name][3]), message
    assert not has_started


def test_a_port_in_use_is_named(attempts):
    address, outcomes = attempts
    message, has_started = outcomes["taken port"]
    assert message.startswith("OSError") and not has_started
    assert f"port of this task is in use. Received: port {address.partition(':')[2]}" in message


def test_without_a_cluster_it_trains_alone(attempts):
    assert attempts[1]["no cluster"] == ["1 0 1", True]


def test_a_strategy_may_be_created_after_the_start_of_tensorflow(attempts):
    assert attempts[1]["late"] == ["1 0 1", True]
