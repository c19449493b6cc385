"""A training on two hosts computes what one process does, though each host is lost once, node 0 first."""

import subprocess
import sys
import threading
from pathlib import Path

import elastic_fits
import numpy as np
import pytest
from child_environment import child_environment
from on_nodes_elastic_fit import WORKERS
from thread_workers import wait_until
from worker_groups import free_addresses

from tfdist.strategies import MirroredStrategy

pytestmark = [pytest.mark.multi_process, pytest.mark.long, pytest.mark.usefixtures("cpus")]
_WORKERS_OF_NODE = (1, 2)


class Node:
    """A launcher, and what it prints."""

    def __init__(self, rank: int, rendezvous: str, folder: Path) -> None:
        options = ["--nodes", "2", "--node-rank", str(rank), "--rendezvous", rendezvous, "--elastic", "1"]
        workers = ["--workers", str(_WORKERS_OF_NODE[rank])]
        script = Path(__file__).with_name("on_nodes_elastic_fit.py")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tfdist.launch", "run", *workers, *options, str(script), str(folder)],
            env=child_environment(TFDIST_TOKEN="0123456789abcdef"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.output = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def wait_for(self, text: str) -> None:
        """Waits until it has printed a text."""
        wait_until(lambda: text in self.output or self._process.poll() is not None, text, limit_seconds=240.0)
        assert text in self.output, self.output[-6000:]

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


def test_each_host_is_lost_once(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (rendezvous,) = free_addresses(1)
    nodes = [Node(rank, rendezvous, tmp_path) for rank in (0, 1)]
    everyone = "living: 0 1 2"
    try:
        nodes[1].wait_for(everyone)
        nodes[0].kill()
        nodes[1].wait_for("the workers of this host train on")
        nodes[1].wait_for("living: 1 2")
        nodes[0] = Node(0, rendezvous, tmp_path)
        nodes[0].wait_for(everyone)
        nodes[1].kill()
        nodes[0].wait_for("training continues without worker 1, worker 2")
        nodes[0].wait_for("living: 0\n")
        nodes[1] = Node(1, rendezvous, tmp_path)
        nodes[1].wait_for(everyone)
        (tmp_path / "all-have-joined").touch()
        codes = [node.end() for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert codes == [0, 0], nodes[0].output[-4000:] + nodes[1].output[-4000:]
    expected = elastic_fits.one_leaves(MirroredStrategy(["CPU:0"]), tmp_path / "one", lambda model: [])
    for rank in range(WORKERS):
        with np.load(tmp_path / f"fit-{rank}.npz") as results:
            for key, values in expected.items():
                # 240 updates of sums that associate differently.
                np.testing.assert_allclose(results[key], values, rtol=5e-6, atol=5e-6, err_msg=f"{key}, {rank}")
