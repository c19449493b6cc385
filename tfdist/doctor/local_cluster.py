"""Starts the workers of a cluster on this machine, which only answer: `tfdist doctor --workers N`."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence

from tfdist.cluster import ClusterConfig, ClusterSpec, Task, from_tf_config
from tfdist.doctor.check_context import CheckContext, python_path
from tfdist.doctor.check_runner import run_checks

_EXIT_SECONDS = 5.0


@contextlib.contextmanager
def local_cluster(ports: Sequence[int], environ: Mapping[str, str], timeout_seconds: float) -> Iterator[ClusterConfig]:
    """Starts all workers of a cluster on loopback but the first; yields the cluster of the first; ends the others."""
    spec = ClusterSpec({"worker": [f"127.0.0.1:{port}" for port in ports]})
    peers: list[subprocess.Popen[bytes]] = []
    try:
        for index in range(1, len(ports)):
            config = ClusterConfig(spec, Task("worker", index)).to_tf_config()
            peers.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tfdist.doctor.local_cluster", str(timeout_seconds)],
                    env={**environ, "TF_CONFIG": config, "PYTHONPATH": python_path(environ)},
                    stdin=subprocess.DEVNULL,
                    preexec_fn=_ignore_interrupts,
                )
            )
        yield ClusterConfig(spec, Task("worker", 0))
        for peer in peers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                peer.wait(_EXIT_SECONDS)
    finally:
        for peer in peers:
            peer.kill()
            peer.wait()


def _ignore_interrupts() -> None:
    """Leaves Ctrl-C, which the terminal sends to all processes, to the first worker: it ends the others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def main(argv: Sequence[str], environ: Mapping[str, str]) -> None:
    """Answers as the worker of `TF_CONFIG` until the first worker has its report."""
    config = from_tf_config(environ)
    context = CheckContext(environ, cores=1, config=config)
    run_checks(context, timeout_seconds=float(argv[0]), say=lambda text: None, checks=())


if __name__ == "__main__":
    main(sys.argv[1:], os.environ)
