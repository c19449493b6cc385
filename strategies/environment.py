"""What the environment tells a strategy that is made: the cluster, and how long the others may take to come up."""

import os
from typing import Any

import tensorflow as tf

from tfdist import cluster

_DEFAULT_START_TIMEOUT_SECONDS = 300.0


def resolver_of(config: cluster.ClusterConfig, **options: Any) -> Any:
    """A cluster resolver of TensorFlow's for a task of a cluster; `options` are further arguments of it."""
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({job: list(addresses) for job, addresses in config.cluster.jobs.items()}),
        task_type=config.task.type,
        task_id=config.task.index,
        rpc_layer="grpc",
        **options,
    )


def start_timeout_seconds(start_timeout: float | None) -> float:
    """How long the others may take: as given, else as `tfdist run --start-timeout` says, else 300 s.

    Raises:
      ValueError: it is no positive number.
    """
    if start_timeout is None:
        start_timeout = float(os.environ.get("TFDIST_START_TIMEOUT", _DEFAULT_START_TIMEOUT_SECONDS))
    if start_timeout <= 0:
        raise ValueError(
            f"`start_timeout` is not a time. Received: {start_timeout}. Expected: a positive number of seconds."
        )
    return start_timeout
