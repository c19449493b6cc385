"""Slurm job steps and host lists."""

import pytest

from tfdist.cluster import expand_hostlist, expand_tasks_per_node, from_slurm, is_slurm_step
from tfdist.cluster.slurm import is_outside_allocation

STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "node[01-03]",
    "SLURM_STEP_TASKS_PER_NODE": "2,1(x2)",
    "TFDIST_PORT": "5000",
}


def step(**changes):
    return {name: value for name, value in {**STEP, **changes}.items() if value is not None}


def test_every_task_is_a_worker():
    configs = [from_slurm(step(SLURM_PROCID=str(rank))) for rank in range(4)]
    assert [config.rank for config in configs] == [0, 1, 2, 3]
    assert len({config.cluster for config in configs}) == 1
    assert configs[0].cluster.jobs["worker"] == ("node01:5000", "node01:5001", "node02:5000", "node03:5000")
    assert configs[0].source == "Slurm"


def test_cyclic_distribution():
    config = from_slurm(step(SLURM_DISTRIBUTION="cyclic:block", SLURM_PROCID="3", SLURM_NODEID="0", SLURM_LOCALID="1"))
    assert config.cluster.jobs["worker"] == ("node01:5000", "node02:5000", "node03:5000", "node01:5001")


def test_tasks_per_node_of_the_job_where_the_step_has_none():
    environ = step(SLURM_STEP_TASKS_PER_NODE=None, SLURM_TASKS_PER_NODE="2,1(x2)", SLURM_STEP_NUM_TASKS=None)
    assert from_slurm(environ).num_workers == 4


HETEROGENEOUS = {
    "SLURM_STEP_NODELIST": "node[1-3]",
    "SLURM_STEP_TASKS_PER_NODE": "1,2(x2)",
    "SLURM_NTASKS": "5",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "node[2-3]",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "node1",
}


@pytest.mark.parametrize("word", ["HET", "PACK"])
@pytest.mark.parametrize(
    ("distribution", "first"),
    [("block", ["node2:5000", "node2:5001", "node3:5000"]), ("cyclic", ["node2:5000", "node3:5000", "node2:5001"])],
)
def test_ranks_of_a_heterogeneous_step_follow_its_components(word, distribution, first):
    """Slurm sorts the list of nodes, but numbers nodes and tasks component by component."""
    environ = {name.replace("HET", word): value for name, value in HETEROGENEOUS.items()}
    last = {"SLURM_PROCID": "4", "SLURM_NODEID": "2", "SLURM_LOCALID": "0", "SLURM_DISTRIBUTION": distribution}
    config = from_slurm(step(**environ, **last))
    assert list(config.cluster.jobs["worker"]) == [*first, "node3:5001", "node1:5000"]
    assert config.address == "node1:5000"


def test_step_of_one_component_of_a_heterogeneous_job():
    config = from_slurm(step(SLURM_JOB_NODELIST_HET_GROUP_0="node07", SLURM_JOB_NODELIST_HET_GROUP_1="node[01-03]"))
    assert config.cluster.jobs["worker"] == ("node01:5000", "node01:5001", "node02:5000", "node03:5000")


def test_port_base_differs_between_jobs_and_steps():
    def port(**changes):
        return int(from_slurm(step(TFDIST_PORT=None, **changes)).address.split(":")[1])

    ports = [port(SLURM_JOB_ID=str(4711 + job), SLURM_STEP_ID=str(step)) for job in range(12) for step in range(10)]
    assert len(set(ports)) == 120, "the first ten steps of twelve neighbouring jobs"
    assert port() == ports[0]
    assert all(1024 < number < 32_768 for number in ports)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (step(), True),
        ({}, False),
        (step(SLURM_STEP_ID=None), False),  # a batch script
        (step(SLURM_NTASKS="1", SLURM_STEP_NUM_TASKS="1"), False),
        (step(SLURM_NTASKS="4", SLURM_STEP_NUM_TASKS="1"), False),  # an interactive shell in an allocation
        (step(SLURM_STEP_NUM_TASKS=None), True),
        (step(SLURM_JOB_NODELIST="node[01-04]", SLURM_GTIDS="0,1", SLURM_NODEID="0"), True),
        # Batch scripts that were submitted within this step have inherited its variables:
        (step(SLURM_NTASKS="2"), False),
        (step(SLURM_JOB_NODELIST="node[02-04]"), False),
        (step(SLURM_JOB_NODELIST="node[01-03]", SLURM_GTIDS="0", SLURM_NODEID="0"), False),
        (step(**HETEROGENEOUS, SLURM_JOB_NODELIST="node2", SLURM_GTIDS="0,1", SLURM_NODEID="0"), True),
    ],
)
def test_is_slurm_step(environ, expected):
    assert is_slurm_step(environ) is expected


@pytest.mark.parametrize(
    ("environ", "host", "expected"),
    [
        ({}, "login", False),
        ({"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1-2]"}, "login", True),  # salloc
        ({"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1-2]"}, "n2.example.org", False),
        ({"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n1", "SLURMD_NODENAME": "n1"}, "other-name", False),
        ({"SLURM_JOB_ID": "1"}, "login", False),
    ],
)
def test_is_outside_allocation(environ, host, expected):
    assert is_outside_allocation(environ, host) is expected


@pytest.mark.parametrize(
    "name", ["SLURM_PROCID", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NUM_TASKS"]
)
def test_missing_variable(name):
    environ = step(**{name: None}, SLURM_NTASKS=None)
    missing = {"SLURM_STEP_TASKS_PER_NODE": "SLURM_TASKS_PER_NODE", "SLURM_STEP_NUM_TASKS": "SLURM_NTASKS"}.get(
        name, name
    )
    with pytest.raises(ValueError, match=f"variable {missing} is missing. Received: {missing}=None. .*srun, one task"):
        from_slurm(environ)


@pytest.mark.parametrize("name", ["SLURM_JOB_ID", "SLURM_STEP_ID"])
def test_no_port_without_job(name):
    with pytest.raises(ValueError, match=f"{name} is missing.*Set TFDIST_PORT"):
        from_slurm(step(**{name: None}, TFDIST_PORT=None))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"SLURM_PROCID": "x"}, "SLURM_PROCID is not a number. Received: SLURM_PROCID='x'. Expected: an integer"),
        ({"SLURM_PROCID": "4"}, "not in the Slurm step. Received: SLURM_PROCID=4 with 4 tasks. Expected: 0 to 3"),
        ({"SLURM_STEP_NODELIST": "node01"}, "contradict each other. Received: 1 nodes"),
        ({"SLURM_STEP_NUM_TASKS": "5"}, "contradict each other. Received: .* 5 tasks. Expected"),
        (
            {"SLURM_DISTRIBUTION": "plane=2"},
            "not supported. Received: SLURM_DISTRIBUTION='plane=2'. Expected: block or",
        ),
        (
            {"SLURM_NODEID": "1", "SLURM_LOCALID": "0"},
            "placement of.*Received: SLURM_NODEID=1.*Expected: SLURM_NODEID=0",
        ),
        ({"TFDIST_PORT": "http"}, "TFDIST_PORT is not a number.*or unset it"),
        ({"TFDIST_PORT": "65535"}, "between 1 and 65535. Received: 'node01:65536'"),
    ],
)
def test_contradictions(changes, message):
    with pytest.raises(ValueError, match=message):
        from_slurm(step(**changes))


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", ["node1"]),
        ("node[01-03,7],gpu1", ["node01", "node02", "node03", "node7", "gpu1"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("r[1-2]n[1,3]-ib", ["r1n1-ib", "r1n3-ib", "r2n1-ib", "r2n3-ib"]),
        ("a,b-1,c.d", ["a", "b-1", "c.d"]),
    ],
)
def test_hosts(text, hosts):
    assert expand_hostlist(text) == tuple(hosts)


@pytest.mark.parametrize("text", ["", "a,", ",a", "a,,b", "n[1-", "n[]", "n[2-1]", "n[a-b]", "n]1[", "n[1]]"])
def test_malformed_hosts(text):
    with pytest.raises(ValueError, match="host list cannot be parsed. Received: .* Expected: Slurm's notation.*Start"):
        expand_hostlist(text)


@pytest.mark.parametrize(("text", "counts"), [("4", [4]), ("2(x3),1", [2, 2, 2, 1]), ("1,2, 3(x1)", [1, 2, 3])])
def test_tasks_per_node(text, counts):
    assert expand_tasks_per_node(text) == tuple(counts)


@pytest.mark.parametrize("text", ["", "2(x)", "2x3", "-1", "1,,2"])
def test_malformed_tasks_per_node(text):
    with pytest.raises(ValueError, match="counts per node cannot be parsed. Received: .* Expected: .*'2\\(x3\\),1'"):
        expand_tasks_per_node(text)
