"""A training on two hosts computes what one process does, though hosts are lost, node 0 too, or cut off."""

import functools
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import elastic_fits
import network_namespaces
import numpy as np
import pytest
from child_environment import child_environment
from on_nodes_elastic_fit import WORKERS
from thread_workers import wait_until
from worker_groups import free_addresses

from tfdist.strategies import MirroredStrategy

pytestmark = [pytest.mark.multi_process, pytest.mark.long, pytest.mark.usefixtures("cpus")]


class Node:
    """A launcher, and what it prints."""

    def __init__(
        self, rank: int, workers: int, rendezvous: str, folder: Path, host: network_namespaces.Host | None = None
    ) -> None:
        options = ["--nodes", "2", "--node-rank", str(rank), "--rendezvous", rendezvous, "--elastic", "1"]
        script = Path(__file__).with_name("on_nodes_elastic_fit.py")
        command = [sys.executable, "-m", "tfdist.launch", "run", "--workers", str(workers), *options, str(script)]
        start = functools.partial(subprocess.Popen, text=True) if host is None else host.start
        self._process = start(
            [*command, str(folder)],
            env=child_environment(TFDIST_TOKEN="0123456789abcdef", TFDIST_SILENCE_LIMIT="3"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.output = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def wait_for(self, text: str, after: str = "") -> None:
        """Waits until it has printed a text, after another one."""

        def is_there() -> bool:
            return text in self.output.partition(after)[2] if after else text in self.output

        wait_until(lambda: is_there() or self._process.poll() is not None, text, limit_seconds=240.0)
        assert is_there(), self.output[-6000:]

    def kill(self) -> None:
        """Kills it; the kernel kills its workers."""
        self._process.kill()
        self._process.wait()
        self._reader.join()

    def end(self) -> int:
        """Waits for its end, and returns its exit code."""
        code = self._process.wait(240)
        self._reader.join()
        return code

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self.output += line
        self._process.stdout.close()  # type: ignore[union-attr]


@pytest.fixture
def started() -> Iterator[list[Node]]:
    """The launchers of a test, which are killed at its end."""
    nodes: list[Node] = []
    yield nodes
    for node in nodes:
        node.kill()


def assert_as_one_process(nodes: list[Node], folder: Path) -> None:
    """Waits until the launchers have ended, and compares what all workers have computed with one process."""
    (folder / "all-have-joined").touch()
    codes = [node.end() for node in nodes]
    assert codes == [0, 0], nodes[0].output[-4000:] + nodes[1].output[-4000:]
    (folder / "one").mkdir()
    expected = elastic_fits.one_leaves(MirroredStrategy(["CPU:0"]), folder / "one", lambda model: [])
    for rank in range(WORKERS):
        with np.load(folder / f"fit-{rank}.npz") as results:
            for key, values in expected.items():
                # 240 updates of sums that associate differently.
                np.testing.assert_allclose(results[key], values, rtol=5e-6, atol=5e-6, err_msg=f"{key}, {rank}")


def test_each_host_is_lost_once(tmp_path: Path, started: list[Node]) -> None:
    (rendezvous,) = free_addresses(1)

    def start(rank: int) -> Node:
        started.append(Node(rank, rank + 1, rendezvous, tmp_path))
        return started[-1]

    nodes = [start(rank) for rank in (0, 1)]
    everyone = "living: 0 1 2"
    nodes[1].wait_for(everyone)
    nodes[0].kill()
    nodes[1].wait_for("the workers of this host train on")
    nodes[1].wait_for("living: 1 2")
    nodes[0] = start(0)
    nodes[0].wait_for(everyone)
    nodes[1].kill()
    nodes[0].wait_for("training continues without worker 1, worker 2")
    nodes[0].wait_for("living: 0\n")
    nodes[1] = start(1)
    nodes[1].wait_for(everyone)
    assert_as_one_process(nodes, tmp_path)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_host_is_cut_off_and_comes_back(tmp_path: Path, started: list[Node], lost: int) -> None:
    """No connection is closed. The host with two workers continues; the coordinator is on node 0 in both cases."""
    if reason := network_namespaces.why_not():
        pytest.skip(reason)
    with network_namespaces.two_hosts() as hosts:
        for rank, host in enumerate(hosts):
            started.append(Node(rank, 1 if rank == lost else 2, f"{hosts[0].address}:29400", tmp_path, host))
        others = started[1 - lost]
        everyone = "living: 0 1 2"
        others.wait_for(everyone)
        hosts[lost].set_link("down")
        rest = "living: 1 2\n" if lost == 0 else "living: 0 1\n"
        others.wait_for(rest)
        started[lost].wait_for("NoMajorityError")
        others.wait_for("the rendezvous was lost" if lost == 0 else "training continues without worker 2")
        hosts[lost].set_link("up")
        others.wait_for(everyone, after=rest)
        assert_as_one_process(started, tmp_path)
