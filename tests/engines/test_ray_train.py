"""FailureRecovery in `TensorflowTrainer` of Ray Train: a killed worker, and a node that Ray announces to be lost."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import ray_train_functions as functions
from engine_runs import engine_environment, eventually
from local_ray import ray_directory

ray = pytest.importorskip("ray", reason="needs the extra `ray`")
train = pytest.importorskip("ray.train", reason="needs the extra `ray`")

pytestmark = [pytest.mark.multi_process, pytest.mark.long]
STEPS = 3 * functions.STEPS_OF_EPOCH
LOCAL = {"include_dashboard": False, "object_store_memory": 80_000_000}


@pytest.fixture(scope="module")
def temporary(tmp_path_factory):
    variables = {"RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "1"}
    with ray_directory() as own, engine_environment(tmp_path_factory.mktemp("temporary"), **variables, **own):
        yield


@pytest.fixture
def local_ray(temporary):
    ray.init(num_cpus=2, **LOCAL)
    yield
    ray.shutdown()


def fit(directory, *, max_failures=0, every_steps=4, seconds_per_step=0.0, killed=False):
    """Trains two workers, on two nodes if there are; returns the weights and the steps of the last attempt."""
    from ray.train.tensorflow import TensorflowTrainer

    directory.mkdir()
    config = {"directory": str(directory), "every_steps": every_steps}
    TensorflowTrainer(
        functions.train,
        train_loop_config={**config, "seconds_per_step": seconds_per_step, "killed": killed},
        scaling_config=train.ScalingConfig(num_workers=2, placement_strategy="SPREAD"),
        run_config=train.RunConfig(
            name="run",
            storage_path=str(directory / "storage"),
            failure_config=train.FailureConfig(max_failures=max_failures),
        ),
    ).fit()
    weights = [weight.tobytes() for weight in np.load(directory / "weights.npz").values()]
    return weights, int((directory / "steps").read_text())


def test_a_killed_worker_changes_no_weight(local_ray, tmp_path):
    expected, steps = fit(tmp_path / "undisturbed")
    assert steps == STEPS
    weights, steps = fit(tmp_path / "killed", max_failures=1, killed=True)
    assert (tmp_path / "killed" / "killed").exists() and steps in (STEPS - 8, STEPS - 4), "resumed"
    assert weights == expected


def drain(address, node):
    """Announces the loss of a node in 12 s, as a cloud does."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", address, "--node-id", node]
    command += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "reclaimed"]
    subprocess.run([*command, "--deadline-remaining-seconds", "12"], check=True, timeout=60, env=os.environ)


def test_an_announced_loss_of_a_node_saves_and_changes_no_weight(temporary, tmp_path):
    """Without failures allowed, and without another save: the one at the notice is what the others resume from."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **LOCAL})
    nodes = [cluster.add_node(num_cpus=1, object_store_memory=80_000_000) for _ in range(2)]
    ray.init(address=cluster.address)
    try:
        expected, _ = fit(tmp_path / "undisturbed")
        spare = cluster.add_node(num_cpus=1, object_store_memory=80_000_000)
        directory = tmp_path / "drained"

        def drain_one():
            eventually(lambda: len(list(directory.glob("trains-*"))) == 2, "training", 90)
            idle = {key for key, free in ray._private.state.available_resources_per_node().items() if free.get("CPU")}
            busy = [node.node_id for node in (*nodes, spare) if node.node_id not in idle]
            drain(cluster.address, busy[0])

        thread = threading.Thread(target=drain_one)
        thread.start()
        weights, steps = fit(directory, every_steps=10**6, seconds_per_step=1.5)
        thread.join()
        assert weights == expected and steps < STEPS, "resumed"
    finally:
        ray.shutdown()
        cluster.shutdown()
