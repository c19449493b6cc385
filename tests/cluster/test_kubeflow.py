"""The manifests for Kubeflow: their schemas, what the operators make of them, and the training that they start."""

import copy
import pathlib
import signal

import kubeflow_manifests as kubeflow
import pytest
import yaml
from kubeflow_pods import Pod, on_loopback, run_until

from tfdist import cluster

ROOT = pathlib.Path(__file__).resolve().parents[2]
DIRECTORY = ROOT / "examples" / "kubeflow"
TFJOB = yaml.safe_load((DIRECTORY / "tfjob.yaml").read_text())
SERVERS = yaml.safe_load((DIRECTORY / "tfjob_parameter_servers.yaml").read_text())
RUNTIME, TRAINJOB = yaml.safe_load_all((DIRECTORY / "trainjob.yaml").read_text())


def changed(manifest, path, value):
    """A copy with another value at a path of keys."""
    copied = copy.deepcopy(manifest)
    *way, last = path
    parent = copied
    for key in way:
        parent = parent[key]
    parent[last] = value
    return copied


def test_every_manifest_is_tested():
    assert sorted(path.name for path in DIRECTORY.iterdir()) == [
        "tfjob.yaml",
        "tfjob_parameter_servers.yaml",
        "trainjob.yaml",
    ]


@pytest.mark.parametrize("manifest", [TFJOB, SERVERS], ids=["workers", "servers"])
def test_tfjob_follows_the_schema(manifest):
    kubeflow.check_tfjob(manifest)


_WORKER = ("spec", "tfReplicaSpecs", "Worker")
_POD = (*_WORKER, "template", "spec")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "sucessPolicy"), "AllWorkers"),
        (("spec", "runPolicy", "backoffLimit"), "16"),
        ((*_WORKER, "replica"), 4),
        ((*_WORKER, "replicas"), "4"),
        ((*_POD, "terminationGracePeriod"), 90),
        ((*_POD, "containers", 0, "args"), "--checkpoints"),
    ],
)
def test_wrong_tfjob_is_noticed(path, value):
    with pytest.raises(ValueError, match=path[-1]):
        kubeflow.check_tfjob(changed(TFJOB, path, value))


@pytest.mark.parametrize("manifest", [RUNTIME, TRAINJOB], ids=["runtime", "job"])
def test_trainer_follows_the_schema(manifest):
    kubeflow.check_trainer(manifest)


_JOBSET = ("spec", "template", "spec")
_JOB = (*_JOBSET, "replicatedJobs", 0, "template", "spec")


@pytest.mark.parametrize(
    ("manifest", "path", "value"),
    [
        (TRAINJOB, ("spec", "trainer", "numNodes"), "4"),
        (TRAINJOB, ("spec", "trainer", "nodes"), 4),
        (RUNTIME, (*_JOBSET, "failurePolicy", "restarts"), 3),
        (RUNTIME, (*_JOB, "backoffLimit"), "0"),
        (RUNTIME, (*_JOB, "template", "spec", "gracePeriodSeconds"), 90),
        (RUNTIME, (*_JOB, "template", "spec", "containers", 0, "command"), "python"),
    ],
)
def test_wrong_trainer_manifest_is_noticed(manifest, path, value):
    with pytest.raises(ValueError, match=rf"(?i){path[-1]}"):
        kubeflow.check_trainer(changed(manifest, path, value))


def test_rules_of_the_training_operator():
    """What its admission and its controller demand beyond the schema."""
    for job in (TFJOB, SERVERS):
        for kind, replicas in job["spec"]["tfReplicaSpecs"].items():
            assert kind in ("Chief", "Worker", "PS", "Evaluator", "Master")
            assert kubeflow.container_of(replicas["template"]["spec"], "tensorflow")["image"]
            assert replicas["restartPolicy"] in ("OnFailure", "Always"), "ExitCode takes 75 for a final failure"
        assert job["spec"]["runPolicy"]["cleanPodPolicy"] == "Running"
    assert TFJOB["spec"]["successPolicy"] == "AllWorkers"
    kinds = SERVERS["spec"]["tfReplicaSpecs"]
    assert {kind: kinds[kind]["restartPolicy"] for kind in kinds} == {
        "Chief": "OnFailure",
        "Worker": "Always",
        "PS": "Always",
    }


def test_rules_of_trainer():
    [replicated] = RUNTIME["spec"]["template"]["spec"]["replicatedJobs"]
    assert replicated["name"] == "node" and replicated.get("replicas", 1) == 1
    assert replicated["template"]["metadata"]["labels"]["trainer.kubeflow.org/trainjob-ancestor-step"] == "trainer"
    job = replicated["template"]["spec"]
    assert job["template"]["spec"]["restartPolicy"] == "Never", "podFailurePolicy is allowed with nothing else"
    codes = {rule["action"]: rule["onExitCodes"] for rule in job["podFailurePolicy"]["rules"] if "onExitCodes" in rule}
    assert {action: rule["values"] for action, rule in codes.items()} == {
        "Ignore": [cluster.PREEMPTED_EXIT_CODE],
        "FailJob": [2],
    }
    assert {rule["containerName"] for rule in codes.values()} == {"node"}
    [rule] = RUNTIME["spec"]["template"]["spec"]["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    reference = TRAINJOB["spec"]["runtimeRef"]
    assert (reference["kind"], reference["name"]) == (RUNTIME["kind"], RUNTIME["metadata"]["name"])


def test_cluster_of_a_tfjob():
    found = kubeflow.operator_variables(TFJOB)
    configs = [cluster.detect(variables) for variables in found.values()]
    assert [config.rank for config in configs] == [0, 1, 2, 3]
    assert configs[0].cluster.jobs["worker"][3] == "train-worker-3.default.svc:2222"
    config = cluster.detect(kubeflow.operator_variables(SERVERS)["ps", 1])
    assert (str(config.task), {job: len(all_) for job, all_ in config.cluster.jobs.items()}) == (
        "ps 1",
        {"chief": 1, "worker": 4, "ps": 2},
    )


def test_cluster_of_a_trainjob():
    """Trainer gives its pods the names `<job>-node-0-<index>.<job>`, and no TF_CONFIG."""
    configs = [cluster.detect(variables) for variables in kubeflow.trainer_variables(RUNTIME, TRAINJOB)]
    assert [config.rank for config in configs] == [0, 1, 2, 3]
    assert {config.source for config in configs} == {"Kubernetes"}
    assert configs[0].cluster.jobs["worker"] == tuple(f"train-node-0-{index}.train:2222" for index in range(4))


TRAIN = """
import argparse, pathlib, time
import keras, numpy as np
from tfdist.callbacks import FailureRecovery
from tfdist.strategies import {strategy}

parser = argparse.ArgumentParser()
parser.add_argument("--checkpoints")
directory = parser.parse_args().checkpoints
here = pathlib.Path(directory).parent
strategy = {strategy}({arguments})
keras.utils.set_random_seed(1)
images = np.random.default_rng(1).normal(size=(96, 8)).astype("float32")
with strategy.scope():
    model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(8), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse")

def wait_in_step_5(batch, logs):
    if batch == 5 and (here / "pause").exists():
        (here / "paused").touch()
        end = time.monotonic() + 60
        while (here / "pause").exists() and time.monotonic() < end:
            time.sleep(0.02)

pause = keras.callbacks.LambdaCallback(on_train_batch_end=wait_in_step_5)
recovery = FailureRecovery(directory, every_steps=2)
model.fit(images, images[:, :1], batch_size=8, epochs=2, verbose=0, callbacks=[pause, recovery])
print("weights", sum(float(abs(weight).sum()) for weight in model.get_weights()).hex(), flush=True)
"""


@pytest.fixture
def start(tmp_path):
    """`start(tfjob, strategy, arguments="", …)`: the pods of a TFJob, by task."""
    pods = {}

    def begin(manifest, strategy, arguments="", *, where=tmp_path, **replicas):
        where.mkdir(exist_ok=True)
        job = copy.deepcopy(manifest)
        for kind, number in replicas.items():
            job["spec"]["tfReplicaSpecs"][kind]["replicas"] = number
        (where / "train.py").write_text(TRAIN.format(strategy=strategy, arguments=arguments))
        specs = {kind.lower(): spec for kind, spec in job["spec"]["tfReplicaSpecs"].items()}
        begun = {}
        for (kind, index), variables in on_loopback(kubeflow.operator_variables(job)).items():
            container = kubeflow.container_of(specs[kind]["template"]["spec"], "tensorflow")
            variables |= {"TF_NUM_INTRAOP_THREADS": "1"}
            pod = Pod(container, variables, specs[kind]["restartPolicy"], where, f"{kind}-{index}")
            begun[kind, index] = pods[where, kind, index] = pod
        return begun

    yield begin
    for pod in pods.values():
        pod.delete()


def results(pods):
    return [line for pod in pods.values() for line in pod.output().splitlines() if line.startswith("weights")]


def finish(pods, manifest):
    """Until the job has succeeded: the chief, or else all workers."""
    needed = [pod for (kind, _), pod in pods.items() if kind == "chief"] or list(pods.values())
    limit = manifest["spec"]["runPolicy"]["backoffLimit"]
    run_until(lambda: all(pod.has_succeeded for pod in needed), pods, backoff_limit=limit)


@pytest.mark.long
def test_workers_of_a_tfjob_train(start):
    pods = start(TFJOB, "MultiWorkerMirroredStrategy", Worker=2)
    finish(pods, TFJOB)
    assert [pod.restarts for pod in pods.values()] == [0, 0]
    first, second = results(pods)
    assert first == second


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_workers_of_a_tfjob_resume(start, tmp_path, number):
    """A drained pod lets all save and exit with 75; a killed one lets the others fail. Either way all are restarted."""
    undisturbed = start(TFJOB, "MultiWorkerMirroredStrategy", where=tmp_path / "undisturbed", Worker=2)
    finish(undisturbed, TFJOB)
    where = tmp_path / "disturbed"
    where.mkdir()
    (where / "pause").touch()
    pods = start(TFJOB, "MultiWorkerMirroredStrategy", where=where, Worker=2)
    run_until((where / "paused").exists, pods, backoff_limit=1)
    pods["worker", 1].send(number)
    (where / "pause").unlink()
    finish(pods, TFJOB)
    expected = 75 if number == signal.SIGTERM else -9
    assert pods["worker", 1].codes[0] == expected and all(pod.restarts for pod in pods.values())
    assert number == signal.SIGKILL or pods["worker", 0].codes == [75, 0]
    assert set(results(pods)) == set(results(undisturbed))


@pytest.mark.long
@pytest.mark.parametrize("lost", [("chief", 0), ("worker", 1), ("ps", 0)], ids=["chief", "worker", "ps"])
def test_parameter_servers_of_a_tfjob_resume(start, tmp_path, lost):
    (tmp_path / "pause").touch()
    pods = start(SERVERS, "ParameterServerStrategy", "start_timeout_seconds=60", Worker=2, PS=1)
    run_until((tmp_path / "paused").exists, pods, backoff_limit=1)
    pods[lost].send(signal.SIGKILL)
    (tmp_path / "pause").unlink()
    finish(pods, SERVERS)
    assert pods[lost].codes[0] == -9
    assert len(results(pods)) == 1
    assert (pods["chief", 0].restarts > 0) == (lost != ("worker", 1))
