"""Workers of a cluster on this machine that do nothing but answer: `tfdist doctor --workers N`."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import tfdist
from tfdist.cluster import ClusterConfig, ClusterSpec, Task, from_tf_config
from tfdist.doctor.examination import examine
from tfdist.doctor.situation import Situation

_LEAVE_SECONDS = 5.0


@contextlib.contextmanager
def local_cluster(ports: Sequence[int], environ: Mapping[str, str], timeout_seconds: float) -> Iterator[ClusterConfig]:
    """Starts all but the first worker of a cluster on loopback, yields the cluster of the first, and ends them.

    Args:
        ports: A free one for each worker.
        environ: Their environment.
        timeout_seconds: How long they wait for each other.
    """
    spec = ClusterSpec({"worker": [f"127.0.0.1:{port}" for port in ports]})
    path = os.pathsep.join([str(Path(tfdist.__file__).parents[1]), environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    peers: list[subprocess.Popen[bytes]] = []
    try:
        for index in range(1, len(ports)):
            config = ClusterConfig(spec, Task("worker", index)).to_tf_config()
            peers.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tfdist.doctor.local_peers", str(timeout_seconds)],
                    env={**environ, "TF_CONFIG": config, "PYTHONPATH": path},
                    stdin=subprocess.DEVNULL,
                )
            )
        yield ClusterConfig(spec, Task("worker", 0))
        for peer in peers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                peer.wait(_LEAVE_SECONDS)
    finally:
        for peer in peers:
            peer.kill()
            peer.wait()


def main(argv: Sequence[str], environ: Mapping[str, str]) -> None:
    """Answers as the worker that `TF_CONFIG` describes, until the first one has its report."""
    config = from_tf_config(environ)
    situation = Situation(environ, cores=1, config=config)
    examine(situation, timeout_seconds=float(argv[0]), say=lambda text: None, checks=())


if __name__ == "__main__":
    main(sys.argv[1:], os.environ)
