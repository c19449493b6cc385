"""MultiWorkerMirroredStrategy of tfdist on two workers of two devices, and what it says of a wrong environment."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]
_LIMIT_SECONDS = 240


def environment(**variables):
    foreign = ("TF_CONFIG", "SLURM_", "TFDIST_", "JOB_COMPLETION_INDEX")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return {**inherited, "PYTHONPATH": str(_ROOT), "TF_CPP_MIN_LOG_LEVEL": "3", **variables}


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What each rank of one run has seen."""
    folder = tmp_path_factory.mktemp("workers")
    script = str(Path(__file__).with_name("on_workers.py"))
    command = [sys.executable, "-m", "tfdist.launch", "run", "--workers", "2", script, str(folder)]
    finished = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=_LIMIT_SECONDS, check=False
    )
    assert finished.returncode == 0, finished.stderr[-6000:]
    assert (folder / "chief.keras").exists()
    return [json.loads((folder / f"seen-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.multi_process
class TestOnWorkers:
    def test_ranks_and_all_logical_devices(self, seen):
        assert [(rank["rank"], rank["workers"], rank["replicas"]) for rank in seen] == [(0, 2, 4), (1, 2, 4)]

    def test_an_epoch_sees_every_sample_once_though_no_seed_was_set(self, seen):
        assert sorted(seen[0]["samples"] + seen[1]["samples"]) == list(range(48))
        assert seen[0]["samples"] != list(range(0, 48, 2)), "not shuffled"

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

    def test_reduce_takes_structures(self, seen):
        assert [rank["reduced"] for rank in seen] == [[4.0, [4.0, 8.0]]] * 2

    def test_reduce_does_not_take_a_variable_for_a_shared_result(self, seen):
        assert [rank["reduced_variable"] for rank in seen] == ["refused", "refused"]  # as under MirroredStrategy
        assert [rank["sum_over_mean"] for rank in seen] == [4.0, 4.0]

    def test_all_stop_where_a_callback_stops(self, seen):
        assert [rank["epochs_until_the_stop"] for rank in seen] == [1, 1]


def run(script, **variables):
    return subprocess.run(
        [sys.executable, "-c", script],
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=_LIMIT_SECONDS,
        check=False,
    )


def tf_config(workers, index=0):
    return json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}})


MAKE = "from tfdist.strategies import MultiWorkerMirroredStrategy\nMultiWorkerMirroredStrategy({})"


def free_address():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def test_a_missing_peer_ends_the_worker_and_is_named():
    absent = free_address()
    finished = run(MAKE.format("start_timeout=3"), TF_CONFIG=tf_config([free_address(), absent]))
    assert finished.returncode == 1, finished.stderr[-3000:]
    assert "TimeoutError: The cluster was not complete after 3 s" in finished.stderr
    assert f"worker 1 at {absent}" in finished.stderr
    assert "start_timeout" in finished.stderr


def test_the_launcher_sets_the_start_timeout():
    finished = run(MAKE.format(""), TF_CONFIG=tf_config([free_address(), free_address()]), TFDIST_START_TIMEOUT="2")
    assert "not complete after 2 s" in finished.stderr


def test_a_taken_port_is_named():
    with socket.create_server(("", 0)) as other:
        own = f"127.0.0.1:{other.getsockname()[1]}"
        finished = run(MAKE.format("start_timeout=3"), TF_CONFIG=tf_config([own, free_address()]))
    assert finished.returncode == 1
    assert "OSError" in finished.stderr
    assert f"own port is taken. Received: port {own.partition(':')[2]}" in finished.stderr


MISTAKES = """
import json, os
from tensorflow.python.eager import context
from tfdist.strategies import MultiWorkerMirroredStrategy
for configuration, arguments in json.loads(os.environ["MISTAKES"]):
    os.environ["TF_CONFIG"] = configuration
    try:
        MultiWorkerMirroredStrategy(**arguments)
    except ValueError as error:
        print(error, "started:", context.context()._initialized, end="|")
"""


def test_mistakes_are_errors_before_tensorflow_starts():
    """In one process, as each leaves all as it was."""
    alone = tf_config([free_address()])
    tried = [
        (tf_config(["a:1", "a:1"]), {}, "a:1"),
        (tf_config(["a:1", "b:2"], 2), {}, "index"),
        (tf_config(["a", "b:2"]), {}, "port"),
        (alone, {"start_timeout": 0}, "`start_timeout` is not a time"),
        (alone, {"start_timeout": -1}, "`start_timeout` is not a time"),
    ]
    finished = run(MISTAKES, MISTAKES=json.dumps([case[:2] for case in tried]))
    *said, rest = finished.stdout.split("|")
    assert len(said) == len(tried) and not rest, finished.stderr[-2000:]
    for message, (*_, expected) in zip(said, tried, strict=True):
        assert expected in message and message.endswith("started: False")


def test_a_strategy_made_after_tensorflow_has_started_is_refused():
    script = "import tensorflow as tf\ntf.constant(1)\n" + MAKE.format("")
    finished = run(script, TF_CONFIG=tf_config([free_address()]))
    assert (
        "RuntimeError: MultiWorkerMirroredStrategy must be made before TensorFlow makes its devices" in finished.stderr
    )
    assert "Move it above the first tensor" in finished.stderr


def test_without_a_cluster_it_trains_alone():
    script = (
        MAKE.format("").replace("\nMulti", "\ns = Multi") + "\nprint(s.num_workers, s.rank, s.num_replicas_in_sync)"
    )
    finished = run(script)
    assert finished.stdout.split() == ["1", "0", "1"], finished.stderr[-2000:]


def test_the_attempts_of_a_run_have_one_seed(monkeypatch):
    from tfdist.strategies.multi_worker import _seed_of_run

    monkeypatch.setenv("TFDIST_RUN_ID", "one")
    first = _seed_of_run()
    assert first == _seed_of_run()
    monkeypatch.setenv("TFDIST_RUN_ID", "another")
    assert first != _seed_of_run()
