"""Serves TensorFlow operations of a chief until it ends."""

import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence

import tensorflow as tf

from tfdist.cluster.heartbeat import Heartbeat
from tfdist.servers.server_monitor import SLOW_LINK_SECONDS, is_reachable

_POLL_SECONDS = 0.5
_CHIEF_LOST_SECONDS = 10.0
_CHIEF_START_SECONDS = 3600.0  # without tfdist run, which ends its servers when the chief ends


def serve(cluster: Mapping[str, Sequence[str]], job: str, index: int) -> None:
    """Runs the server of a task, such as "worker" 0; returns when the chief, once seen, cannot be reached for 10 s.

    A chief that does not answer at all, instead of refusing the connection, has 30 s: the link may be busy. One
    that has not been reached within an hour is a TimeoutError; under `tfdist run`, which ends its servers when the
    chief ends, there is no limit.

    SIGTERM ends the process with exit code 0. SIGUSR1 is ignored: schedulers send it to every process of a run, and
    the chief, which saves then, needs its servers.
    """
    if threading.current_thread() is threading.main_thread():
        # TensorFlow's server prevents an orderly exit of the interpreter.
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
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
    started_at, seen_at = time.monotonic(), None
    while True:
        # Before the time counts: a process that was stopped must not take its own absence for the chief's.
        if is_reachable(chief, SLOW_LINK_SECONDS):
            seen_at = time.monotonic()
        elif seen_at is not None and time.monotonic() - seen_at >= _CHIEF_LOST_SECONDS:
            return
        elif seen_at is None and heartbeat is None and time.monotonic() - started_at > _CHIEF_START_SECONDS:
            raise TimeoutError(
                f"The chief of this server has not started after {_CHIEF_START_SECONDS:g} s. Received: no answer from "
                f"chief 0 at {chief}. Expected: a process there that creates the strategy. Start it, open its port, or "
                "correct TF_CONFIG, and start this server again."
            )
        time.sleep(_POLL_SECONDS)
