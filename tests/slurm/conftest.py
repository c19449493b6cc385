"""Fixtures: a real Slurm, once for each way in which it finds processes, and a directory of the user for each test."""

import pathlib
import re
from collections.abc import Iterator

import pytest
import slurm_cluster
from child_environment import ROOT

PROCTRACK = ("linuxproc", "cgroup")


@pytest.fixture(scope="session")
def clusters() -> Iterator[dict[str, slurm_cluster.SlurmCluster]]:
    """The clusters that have been started, by the way in which they find processes."""
    started: dict[str, slurm_cluster.SlurmCluster] = {}
    yield started
    for cluster in started.values():
        cluster.end()


def _cluster(clusters: dict[str, slurm_cluster.SlurmCluster], proctrack: str) -> Iterator[slurm_cluster.SlurmCluster]:
    if reason := slurm_cluster.why_not(proctrack):
        pytest.skip(reason)
    if proctrack not in clusters:
        clusters[proctrack] = slurm_cluster.SlurmCluster(proctrack)
    yield clusters[proctrack]
    try:
        clusters[proctrack].clean()
    except (RuntimeError, TimeoutError):  # a failed test must not disturb the next one
        clusters.pop(proctrack).end()


@pytest.fixture
def slurm(clusters: dict[str, slurm_cluster.SlurmCluster]) -> Iterator[slurm_cluster.SlurmCluster]:
    """A Slurm."""
    yield from _cluster(clusters, "linuxproc")


@pytest.fixture(params=PROCTRACK)
def any_slurm(
    request: pytest.FixtureRequest, clusters: dict[str, slurm_cluster.SlurmCluster]
) -> Iterator[slurm_cluster.SlurmCluster]:
    """A Slurm of each kind."""
    yield from _cluster(clusters, request.param)


@pytest.fixture
def directory(request: pytest.FixtureRequest, clusters: dict[str, slurm_cluster.SlurmCluster]) -> pathlib.Path:
    """A directory of the user on all hosts. Request it after the cluster."""
    name = re.sub(r"\W+", "-", request.node.name)
    cluster = next(request.getfixturevalue(kind) for kind in ("slurm", "any_slurm") if kind in request.fixturenames)
    return cluster.make_directory(name)


@pytest.fixture
def scripts(directory: pathlib.Path) -> pathlib.Path:
    """The directory, with the batch scripts of the examples; they start one worker on each node."""
    for script in (ROOT / "examples" / "slurm").iterdir():
        text = script.read_text()
        assert text.count("--workers 4 ") == 1 and text.count("--cpus-per-task=8") == 1
        text = text.replace("--workers 4 ", "--workers 1 ").replace("--cpus-per-task=8", "--cpus-per-task=2")
        (directory / script.name).write_text(text)
    return directory
