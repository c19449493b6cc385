import pytest

from tfdist.cluster import from_kubernetes, is_kubernetes_cluster

OURS = {"TFDIST_NUM_WORKERS": "3", "TFDIST_SERVICE": "train"}
WORKERS = ("digits-0.train:2222", "digits-1.train:2222", "digits-2.train:2222")


def test_indexed_job():
    config = from_kubernetes({**OURS, "JOB_COMPLETION_INDEX": "2", "HOSTNAME": "digits-2"})
    assert (config.cluster.jobs["worker"], config.rank, config.source) == (WORKERS, 2, "Kubernetes")


def test_indexed_job_with_a_name():
    assert from_kubernetes({**OURS, "JOB_COMPLETION_INDEX": "0", "TFDIST_JOB_NAME": "digits"}).cluster.jobs == {
        "worker": WORKERS
    }


@pytest.mark.parametrize("hostname", ["digits-1", "digits-1.train.default.svc.cluster.local"])
def test_stateful_set(hostname):
    config = from_kubernetes({**OURS, "HOSTNAME": hostname})
    assert (config.cluster.jobs["worker"], config.rank) == (WORKERS, 1)


def test_name_with_dashes_and_port():
    config = from_kubernetes({**OURS, "HOSTNAME": "my-set-2-0", "TFDIST_PORT": "99"})
    assert config.address == "my-set-2-0.train:99"


def test_only_our_variables_make_a_cluster():
    assert not is_kubernetes_cluster({"JOB_COMPLETION_INDEX": "0", "HOSTNAME": "a-0", "KUBERNETES_SERVICE_HOST": "x"})
    assert is_kubernetes_cluster({"TFDIST_NUM_WORKERS": "2"})
    assert is_kubernetes_cluster({"TFDIST_SERVICE": "s"})
    assert not is_kubernetes_cluster({"TFDIST_SERVICE": " "})


@pytest.mark.parametrize("name", list(OURS))
def test_missing_variable(name):
    environ = {key: value for key, value in OURS.items() if key != name}
    with pytest.raises(ValueError, match=f"{name} is missing. Received: {name}=None. Expected: .*headless service"):
        from_kubernetes({**environ, "HOSTNAME": "a-0"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"TFDIST_NUM_WORKERS": "two"}, "not a number. Received: TFDIST_NUM_WORKERS='two'"),
        ({"TFDIST_NUM_WORKERS": "0"}, "at least one worker. Received: TFDIST_NUM_WORKERS=0"),
        ({"HOSTNAME": "digits-3"}, "out of range. Received: index 3 .*Expected: 0 to 2.*ordinals start at 0"),
        ({"HOSTNAME": "digits"}, "does not end in its index. Received: HOSTNAME='digits'. Expected: '<name>-<index>'"),
        ({"HOSTNAME": ""}, "does not end in its index. Received: HOSTNAME=''.*set TFDIST_JOB_NAME"),
        ({"JOB_COMPLETION_INDEX": "-1"}, "not a number. Received: JOB_COMPLETION_INDEX='-1'"),
        ({"TFDIST_PORT": "0"}, "between 1 and 65535. Received: 'digits-0.train:0'"),
    ],
)
def test_mistakes(changes, message):
    with pytest.raises(ValueError, match=message):
        from_kubernetes({**OURS, "HOSTNAME": "digits-0", **changes})
