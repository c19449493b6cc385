"""A worker's or a server's process: serves until the chief is done."""

import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence

import tensorflow as tf

from tfdist.cluster import why_unreachable
from tfdist.cluster.heartbeat import Heartbeat

_POLL_SECONDS = 0.5
_GONE_SECONDS = 10.0
_ATTEMPT_SECONDS = 1.0


def serve(cluster: Mapping[str, Sequence[str]], job: str, index: int) -> None:
    """Serves the task `index` of `job`; returns when the chief, having been there, is gone for 10 s.

    SIGTERM ends the process with exit code 0.

    Args:
      cluster: the addresses of each job.
      job: "worker" or "ps".
      index: from 0.
    """
    if threading.current_thread() is threading.main_thread():
        # TensorFlow's server does not let an interpreter end in order.
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    config = tf.compat.v1.ConfigProto()
    config.experimental.share_session_state_in_clusterspec_propagation = True
    config.inter_op_parallelism_threads = max(4, len(cluster.get("worker", ())) + 1)
    server = tf.distribute.Server(
        tf.train.ClusterSpec({name: list(addresses) for name, addresses in cluster.items()}),
        job_name=job,
        task_index=index,
        protocol="grpc",
        config=config,
        start=True,
    )
    heartbeat = Heartbeat.from_environment()
    if heartbeat is not None:
        heartbeat.start()
        heartbeat.ready()
    chief = cluster.get("chief", [None])[0]
    if chief is None:
        server.join()
        return
    seen_at: float | None = None
    while seen_at is None or time.monotonic() - seen_at < _GONE_SECONDS:
        if is_reachable(chief):
            seen_at = time.monotonic()
        time.sleep(_POLL_SECONDS)


def wait_for_servers(cluster: Mapping[str, Sequence[str]], limit_seconds: float) -> None:
    """Waits until all parameter servers and a worker take connections.

    Raises:
      TimeoutError: some did not in time; the message names them.
    """
    missing = {
        f"{job} {index}": address for job in ("ps", "worker") for index, address in enumerate(cluster.get(job, ()))
    }
    deadline = time.monotonic() + limit_seconds
    while True:
        missing = {name: address for name, address in missing.items() if not is_reachable(address)}
        if not missing:
            return
        if time.monotonic() > deadline:
            named = ", ".join(f"{name} at {address}" for name, address in missing.items())
            raise TimeoutError(
                f"The cluster was not complete after {limit_seconds:g} s. Received: no answer from {named}. Expected: "
                "a process there that serves (tfdist run starts them; else run the script as every task, or python -m "
                "tfdist.parameter_server with its TF_CONFIG). Start them, open their ports, or give more time by "
                "start_timeout."
            )
        time.sleep(_POLL_SECONDS)


def is_reachable(address: str) -> bool:
    """Whether a process takes connections at `address`, a "host:port"."""
    return why_unreachable(address, _ATTEMPT_SECONDS) is None
