"""TensorFlow's cluster, which NCCL between GPUs of several workers needs in place of tfdist's exchange."""

import contextlib
from collections.abc import Iterator
from typing import Any

from tfdist import cluster
from tfdist.strategies.cluster_resolver import peer_addresses, silence_limit_of_environment
from tfdist.tensorflow_internals.runtime import (
    ClusterKeyValues,
    cluster_is_running,
    exit_on_timeout,
    silence_limit,
    tensorflow_has_started,
    use_key_values,
)


@contextlib.contextmanager
def tensorflow_cluster(spec: dict[str, list[str]], resolver: Any, timeout_seconds: float) -> Iterator[None]:
    """Within this context a strategy starts TensorFlow's server and waits for the other workers.

    Args:
        spec: By job, the addresses of its tasks.
        resolver: Of the cluster.
        timeout_seconds: How long the others may take to start.

    Raises:
        RuntimeError: TensorFlow has already created its devices.
        TimeoutError: A worker did not start in time. The message names it.
    """
    peers = peer_addresses(spec, resolver)
    if not peers:
        yield
        return
    if not cluster_is_running():
        if tensorflow_has_started():
            raise RuntimeError(
                "With NCCL, MultiWorkerMirroredStrategy must be created before TensorFlow creates its devices. "
                f"Received: a cluster of {sum(map(len, spec.values()))} tasks (from TF_CONFIG or a scheduler's "
                "variables) after TensorFlow has started. Expected: the strategy is the first TensorFlow object that "
                "the program creates, and TF_CONFIG is set before. Move it above the first tensor, variable, dataset "
                "or `tf.config.list_logical_devices()`, or leave NCCL out of `communication_options`."
            )
        own_address, is_fixed = spec[resolver.task_type][resolver.task_id], cluster.is_slurm_step()
        cluster.wait_for_peers(own_address, peers, timeout_seconds, names_are_fixed=is_fixed)
    with exit_on_timeout(timeout_seconds), silence_limit(silence_limit_of_environment()):
        use_key_values(ClusterKeyValues())
        yield
