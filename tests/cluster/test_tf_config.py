import json
import os
from unittest import mock

import pytest

from tfdist.cluster import ClusterConfig, ClusterSpec, Task, from_tf_config, has_tf_config

CLUSTER = {"worker": ["a:1", "b:1"]}


def read(cluster=CLUSTER, task_type="worker", index=0, **more):
    document = {"cluster": cluster, "task": {"type": task_type, "index": index}, **more}
    return from_tf_config({"TF_CONFIG": json.dumps(document)})


def test_reads_what_to_tf_config_wrote():
    config = ClusterConfig(ClusterSpec({**CLUSTER, "ps": ["p:1"], "evaluator": ["e:1"]}), Task("worker", 1))
    assert from_tf_config({"TF_CONFIG": config.to_tf_config()}) == config


def test_names_its_source():
    assert read().source == "TF_CONFIG"


def test_unknown_keys_are_tolerated():
    assert read(environment="cloud", job={"scale": 1}) == read()


@pytest.mark.parametrize("task_type", ["ps", "evaluator"])
def test_tasks_that_do_not_train(task_type):
    assert read({**CLUSTER, task_type: ["x:1"]}, task_type).task == Task(task_type, 0)


def test_default_is_the_process_environment():
    with mock.patch.dict(
        os.environ, {"TF_CONFIG": json.dumps({"cluster": CLUSTER, "task": {"type": "worker", "index": 1}})}
    ):
        assert has_tf_config()
        assert from_tf_config().rank == 1
    with mock.patch.dict(os.environ, clear=True):
        assert not has_tf_config()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "not set or empty. Received: ''. Expected: JSON such as"),
        ("  ", "not set or empty"),
        ("{'cluster': {}}", r"not JSON \(.* at character 1\). Received: {'cluster'.*Expected: JSON such.*json.dumps"),
        ("[1]", r"The document must be a JSON object. Received: \[1\]. Expected: an object with the key 'cluster'"),
        ("{}", "key 'cluster' is missing in the document. Received: {}. Expected: .*unset TF_CONFIG"),
        ('{"cluster": {}, "task": {"type": "worker", "index": 0}}', "at least one job. Received: cluster={}"),
        ('{"cluster": {"worker": ["a:1"]}}', "key 'task' is missing in the document. Received: .*Expected: "),
        (
            '{"cluster": {"worker": ["a:1"]}, "task": 3}',
            "'task' must be a JSON object. Received: 3. Expected: .*'type'",
        ),
        ('{"cluster": {"worker": ["a:1"]}, "task": {"index": 0}}', "key 'type' is missing in 'task'"),
        ('{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker"}}', "key 'index' is missing in 'task'"),
        ('{"cluster": {"worker": ["a:1"]}, "task": {"type": "wrk", "index": 0}}', "Unknown task type. Received: 'wrk'"),
        ('{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": "0"}}', "integer.*Received: index='0'"),
        ('{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": -1}}', "integer.*Received: index=-1"),
        (
            '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 1}}',
            "out of range. Received: task wor",
        ),
        ('{"cluster": {"worker": ["a:1", "a:1"]}, "task": {"type": "worker", "index": 1}}', "same address"),
        ('{"cluster": {"worker": ["a"]}, "task": {"type": "worker", "index": 0}}', "a host and a port. Received: 'a'"),
        ('{"cluster": {"worker": ["a:99999"]}, "task": {"type": "worker", "index": 0}}', "between 1 and 65535"),
    ],
)
def test_every_mistake_is_named(text, message):
    with pytest.raises(ValueError, match=f"^TF_CONFIG is wrong. .*{message}"):
        from_tf_config({} if text is None else {"TF_CONFIG": text})


def test_a_long_value_is_cut_in_the_message():
    with pytest.raises(ValueError, match=r"… \(5000 characters\)") as error:
        from_tf_config({"TF_CONFIG": "x" * 5000})
    assert len(str(error.value)) < 1000
