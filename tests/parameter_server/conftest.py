"""The cluster on which the chief runs the cases of several files."""

import pytest
from cluster_cases import cases_of
from cluster_runs import launch_chief_once


@pytest.fixture(scope="session")
def cluster(tmp_path_factory, request):
    """The run of the cases of all selected tests on two workers and two servers."""
    names = cases_of(request.session.items)
    return launch_chief_once(tmp_path_factory, "on_cluster_cases.py", *names, servers=2)


@pytest.fixture
def found(cluster):
    """`found(name)`: what a case has returned."""

    def of(name):
        results = cluster.json("results.json")
        assert name in results, f"The chief has ended before the case {name}:\n{cluster.output[-6000:]}"
        assert "error" not in results[name], results[name]["error"]
        return results[name]

    return of
