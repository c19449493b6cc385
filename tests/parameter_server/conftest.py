"""The cluster on which the chief runs the cases of several files."""

import pytest
from cluster_cases import OTHERS, OWN, PARITY, ROUNDS
from cluster_runs import launch_chief_once


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    """The run of all cases on two workers and two servers."""
    return launch_chief_once(tmp_path_factory, "on_cluster_cases.py", *ROUNDS, *PARITY, *OWN, *OTHERS, servers=2)


@pytest.fixture
def found(cluster):
    """`found(name)`: what a case has returned."""

    def of(name):
        results = cluster.json("results.json")
        assert name in results, f"The chief has ended before the case {name}:\n{cluster.output[-6000:]}"
        assert "error" not in results[name], results[name]["error"]
        return results[name]

    return of
