import copy
import dataclasses
import json
import pickle

import pytest

from tfdist.cluster import ClusterConfig, ClusterSpec, Task

JOBS = {"worker": ["a:1", "b:1"], "chief": ["c:1"], "ps": ["d:1"], "evaluator": ["e:1"]}


def test_rank_order_is_chief_first():
    cluster = ClusterSpec(JOBS)
    assert cluster.workers == (Task("chief", 0), Task("worker", 0), Task("worker", 1))
    assert [cluster.rank(task) for task in cluster.workers] == [0, 1, 2]
    assert (cluster.num_workers, cluster.num_parameter_servers) == (3, 1)


@pytest.mark.parametrize("task", [Task("ps", 0), Task("evaluator", 0), Task("worker", 2)])
def test_only_workers_have_a_rank(task):
    with pytest.raises(ValueError, match=f"Received: {task}. Expected: one of chief 0, worker 0, worker 1"):
        ClusterSpec(JOBS).rank(task)


def test_specs_are_values():
    cluster = ClusterSpec(JOBS)
    assert cluster == ClusterSpec({name: tuple(addresses) for name, addresses in JOBS.items()})
    assert hash(cluster) == hash(ClusterSpec(dict(reversed(JOBS.items()))))
    assert cluster != ClusterSpec({"worker": ["a:1"]})
    assert pickle.loads(pickle.dumps(cluster)) == copy.deepcopy(cluster) == cluster
    with pytest.raises(dataclasses.FrozenInstanceError):
        cluster.jobs = {}
    with pytest.raises(TypeError):
        cluster.jobs["worker"] = ()


def test_config_describes_this_process():
    config = ClusterConfig(ClusterSpec(JOBS), Task("worker", 1))
    assert (config.rank, config.num_workers, config.is_chief, config.address) == (2, 3, False, "b:1")
    assert ClusterConfig(ClusterSpec(JOBS), Task("chief", 0)).is_chief
    assert ClusterConfig(ClusterSpec({"worker": ["a:1", "b:1"]}), Task("worker", 0)).is_chief
    assert not ClusterConfig(ClusterSpec(JOBS), Task("ps", 0)).is_chief


def test_to_tf_config_is_what_tensorflow_reads():
    config = ClusterConfig(ClusterSpec(JOBS), Task("worker", 1))
    assert json.loads(config.to_tf_config()) == {"cluster": JOBS, "task": {"type": "worker", "index": 1}}


def test_evaluator_needs_no_address():
    assert ClusterConfig(ClusterSpec({"worker": ["a:1"]}), Task("evaluator", 0)).task.type == "evaluator"


@pytest.mark.parametrize("address", ["host:1", "10.0.0.1:65535", "[::1]:2222", "a-b.c_d.example:80"])
def test_good_addresses(address):
    assert ClusterSpec({"worker": [address]}).jobs["worker"] == (address,)


@pytest.mark.parametrize(
    "address", ["host", "host:", ":1", "host:http", "grpc://host:1", "a:1:2", "", 2222, None, "a b:1"]
)
def test_address_without_host_and_port(address):
    with pytest.raises(
        ValueError, match=r"host and a port. Received: .* for worker 0. Expected: \"host:port\".*Add the"
    ):
        ClusterSpec({"worker": [address]})


@pytest.mark.parametrize("port", ["0", "65536", "123456"])
def test_port_out_of_range(port):
    with pytest.raises(ValueError, match=f"between 1 and 65535. Received: 'a:{port}'.* Expected: a free port"):
        ClusterSpec({"worker": [f"a:{port}"]})


@pytest.mark.parametrize(
    ("jobs", "message"),
    [
        ({}, "at least one job. Received: cluster={}. Expected: a dictionary"),
        ([], "at least one job. Received: cluster=\\[\\]"),
        ({"worker": []}, "at least one address. Received: an empty list for job 'worker'. Expected: .* Remove jobs"),
        ({"worker": "a:1"}, "must be a list. Received: 'a:1' for job 'worker'. Expected: a list"),
        ({"worker": {"0": "a:1"}}, "must be a list. Received: {'0': 'a:1'}"),
        ({"worker": 3}, "must be a list. Received: 3"),
        (
            {"master": ["a:1"]},
            "Unknown task type. Received: 'master'. Expected: one of chief.*old name of 'chief'. Rename",
        ),
        ({"chief": ["a:1", "b:1"]}, "at most one chief. Received: 2 addresses .* List the others under 'worker'"),
        (
            {"worker": ["a:1", "A:1"]},
            "same address. Received: 'A:1' for worker 0 and for worker 1. Expected.*different",
        ),
        ({"worker": ["a:1"], "ps": ["a:1"]}, "same address. Received: 'a:1' for worker 0 and for ps 0"),
    ],
)
def test_wrong_clusters(jobs, message):
    with pytest.raises(ValueError, match=message):
        ClusterSpec(jobs)


@pytest.mark.parametrize("index", [-1, 1.0, "0", None, True])
def test_wrong_index(index):
    with pytest.raises(ValueError, match=f"integer of at least 0. Received: index={index!r}.*Expected.*without quotes"):
        Task("worker", index)


@pytest.mark.parametrize("task_type", ["wroker", None, 0, ["worker"]])
def test_wrong_task_type(task_type):
    with pytest.raises(
        ValueError, match="Unknown task type. Received: .*Expected: one of chief, worker, ps, evaluator"
    ):
        Task(task_type, 0)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (
            Task("worker", 2),
            r"out of range. Received: task worker 2 of a job with 2.*Expected: worker 0..1. Count from 0",
        ),
        (Task("chief", 0), r"not in the cluster. Received: task chief 0.*Expected: worker 0..1. Add the job 'chief'"),
    ],
)
def test_task_outside_the_cluster(task, message):
    cluster = ClusterSpec({"worker": ["a:1", "b:1"]})
    with pytest.raises(ValueError, match=message):
        ClusterConfig(cluster, task)
    with pytest.raises(ValueError, match=f"no such task. Received: {task}. Expected: worker 0..1"):
        cluster.address(task)
