"""ParameterServerStrategy checks its arguments and the cluster before it connects to anything."""

import re
import socket

import pytest


@pytest.fixture(scope="module")
def strategies(cpus):
    from tfdist import strategies

    return strategies


def resolver(servers, task="chief", **others):
    import tensorflow as tf

    jobs = {"chief": ["127.0.0.1:1"], "worker": ["127.0.0.1:2", "127.0.0.1:3"], "ps": servers, **others}
    spec = tf.train.ClusterSpec(jobs)
    return tf.distribute.cluster_resolver.SimpleClusterResolver(spec, task_type=task, task_id=0, rpc_layer="grpc")


REJECTED = [
    ("mode=3", "Invalid `mode`. Received: 3. Expected: tfdist.strategies.Asynchronous(), Synchronous() or Fed"),
    ("mode=Synchronous", "Invalid `mode`. Received: <class"),
    ("mode=Synchronous(2)", "Rounds would wait for no worker. Received: Synchronous(backup_workers=2) with 2 workers."),
    ("gradient_accumulation_steps=0", "Invalid `gradient_accumulation_steps`. Received: 0."),
    ("gradient_accumulation_steps=True", "Invalid `gradient_accumulation_steps`. Received: True."),
    ("gradient_accumulation_steps=2.0", "Invalid `gradient_accumulation_steps`. Received: 2.0."),
    ("compression=Policy('int8', dense_steps=5)", "A push is encoded from the first step on. Received: a policy with"),
    ("compression='int7'", "Unknown compressor name. Received: 'int7'."),
    ("pull_dtype='int8'", "Invalid `pull_dtype`. Received: 'int8'. Expected: 'bfloat16', 'float16' or None."),
    ("variable_partitioner=2", "Invalid `variable_partitioner`. Received: 2. Expected: one of tf.distribute.experim"),
]


@pytest.mark.parametrize(("argument", "message"), REJECTED)
def test_wrong_arguments(strategies, argument, message):
    from tfdist.compression import Policy

    names = {"Synchronous": strategies.Synchronous, "Policy": Policy}
    with pytest.raises(ValueError, match=re.escape(message)):
        arguments = eval(f"dict({argument})", names)
        strategies.ParameterServerStrategy(resolver(["127.0.0.1:4"]), start_timeout_seconds=0.01, **arguments)


@pytest.mark.parametrize(
    ("config", "received"),
    [
        (None, "no TF_CONFIG"),
        ('{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}', "a cluster of ['worker']"),
    ],
)
def test_no_cluster_with_servers(strategies, monkeypatch, config, received):
    for name in ("TF_CONFIG", "SLURM_JOB_ID", "JOB_COMPLETION_INDEX"):
        monkeypatch.delenv(name, raising=False)
    if config:
        monkeypatch.setenv("TF_CONFIG", config)
    with pytest.raises(ValueError, match="no cluster with parameter servers") as error:
        strategies.ParameterServerStrategy()
    assert f"Received: {received}. Expected: TF_CONFIG with the jobs chief, worker and ps." in str(error.value)
    assert "tfdist run --workers 2 --parameter-servers 1 script.py" in str(error.value)


@pytest.mark.parametrize(
    ("servers", "task", "others", "message"),
    [
        (["a:1"], "chief", {"chief": ["b:1", "c:1"]}, "{'chief': 2, 'ps': 1, 'worker': 2}, the number of tasks"),
        (["a:1"], "chief", {"helper": ["b:1"]}, "Received: {'chief': 1, 'helper': 1, 'ps': 1, 'worker': 2}"),
        (["a:1"], "ps", {"worker": []}, "Invalid cluster for parameter servers. Received: {'chief': 1, 'ps': 1"),
        ([], "worker", {}, "at least one worker and one ps"),
        (["a:1"], "evaluator", {"evaluator": ["b:1"]}, "not a task of its cluster with parameter servers. Received: t"),
        (["a:1"], "master", {}, "Received: task type 'master', index 0, and the tasks {'chief': 1, 'ps': 1, 'worker'"),
    ],
    ids=["two chiefs", "unknown job", "no worker", "no server", "evaluator", "unknown task"],
)
def test_a_wrong_cluster_is_refused_before_anything_waits_or_serves(strategies, servers, task, others, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        strategies.ParameterServerStrategy(resolver(servers, task, **others), start_timeout_seconds=0.01)


def test_servers_that_are_missing_are_named(strategies, monkeypatch):
    """Two of five can be reached."""
    with socket.socket() as first, socket.socket() as second, socket.socket() as silent:
        for listener in (first, second, silent):
            listener.bind(("127.0.0.1", 0))
        first.listen()
        second.listen()
        ports = [listener.getsockname()[1] for listener in (first, second, silent)]
        with pytest.raises(TimeoutError) as error:
            cluster = resolver([f"127.0.0.1:{port}" for port in (ports[0], ports[2], ports[1])])
            strategies.ParameterServerStrategy(cluster, start_timeout_seconds=0.2)
    message = str(error.value)
    assert message.startswith("The cluster was not complete after 0.2 s. Received: no answer from ps 1 at 127.0.0.1:")
    assert "worker 0 at 127.0.0.1:2, worker 1 at 127.0.0.1:3" in message
    assert "ps 0" not in message and "ps 2" not in message and "start_timeout_seconds" in message


def test_the_limit_comes_from_the_launcher(strategies, monkeypatch):
    monkeypatch.setenv("TFDIST_START_TIMEOUT", "0.125")
    with pytest.raises(TimeoutError, match="not complete after 0.125 s"):
        strategies.ParameterServerStrategy(resolver(["127.0.0.1:4"]))
