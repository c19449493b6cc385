"""TensorFlow's server in this process: whether it runs, and the key-value store that the workers share."""

import os
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tfdist.tensorflow_internals.symbols import context

PEER_MISSING_EXIT_CODE = 75  # EX_TEMPFAIL: another try may succeed


def cluster_is_running() -> bool:
    """Whether a multi-worker strategy has started TensorFlow's server in this process."""
    return context()._collective_ops_server_def is not None


def tensorflow_has_started() -> bool:
    """Whether TensorFlow has made its devices, after which no server can be added."""
    return bool(context()._initialized)


def global_seed() -> int | None:
    """TensorFlow's global seed in this process, if one was set."""
    seed = context()._seed
    return None if seed is None else int(seed)


def share(key: str, value: str) -> None:
    """Makes `value` known to all workers under `key`, which must be new."""
    context().set_config_key_value(key, value)


def shared(key: str) -> str:
    """Waits until some worker has shared `key` and returns its value."""
    return str(context().get_config_key_value(key))


def _unreachable(addresses: Sequence[str], timeout_seconds: float) -> list[str]:
    missing = []
    for address in addresses:
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=timeout_seconds).close()
        except OSError as error:
            missing.append(f"{address} ({error})")
    return missing


@contextmanager
def start_limit(peers: dict[str, str], timeout_seconds: float) -> Iterator[None]:
    """Ends this process if its peers are not up after `timeout_seconds`.

    TensorFlow waits for a missing peer for ever, in C++ and deaf to SIGTERM, so that nothing short of ending the
    process helps; a thread does it, after it has looked which peers do not answer.

    Args:
      peers: task name (`worker 1`) to address of all tasks but this one.
      timeout_seconds: how long to wait.
    """
    done = threading.Event()

    def watch() -> None:
        if done.wait(timeout_seconds):
            return
        names = {address: task for task, address in peers.items()}
        missing = [f"{names[entry.split(' ')[0]]} at {entry}" for entry in _unreachable(list(peers.values()), 1.0)]
        found = "; ".join(missing) if missing else "all answer on their ports, but not all have joined"
        print(
            f"tfdist: the cluster was not complete after {timeout_seconds:g} s. Received: {found}. Expected: every "
            "task of the cluster to start its strategy in that time. Look at the missing tasks' logs, or give them "
            "longer with `tfdist run --start-timeout` or `MultiWorkerMirroredStrategy(start_timeout=...)`.",
            file=sys.stderr,
            flush=True,
        )
        os._exit(PEER_MISSING_EXIT_CODE)

    watcher = threading.Thread(target=watch, name="tfdist-start-limit", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
