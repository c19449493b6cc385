import pytest

from tfdist.cluster import expand_hostlist, expand_tasks_per_node


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
    with pytest.raises(ValueError, match="host list cannot be read. Received: .* Expected: Slurm's notation.*Start"):
        expand_hostlist(text)


@pytest.mark.parametrize(("text", "counts"), [("4", [4]), ("2(x3),1", [2, 2, 2, 1]), ("1,2, 3(x1)", [1, 2, 3])])
def test_tasks_per_node(text, counts):
    assert expand_tasks_per_node(text) == tuple(counts)


@pytest.mark.parametrize("text", ["", "2(x)", "2x3", "-1", "1,,2"])
def test_malformed_tasks_per_node(text):
    with pytest.raises(ValueError, match="tasks a node cannot be read. Received: .* Expected: .*'2\\(x3\\),1'"):
        expand_tasks_per_node(text)
