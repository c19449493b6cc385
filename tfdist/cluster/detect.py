"""Detects the cluster that the environment describes."""

import os
from collections.abc import Mapping

from tfdist.cluster.cluster_spec import ClusterConfig
from tfdist.cluster.kubernetes import from_kubernetes, is_kubernetes_cluster
from tfdist.cluster.slurm import from_slurm, is_slurm_step
from tfdist.cluster.tf_config import from_tf_config, has_tf_config


def detect(environ: Mapping[str, str] | None = None) -> ClusterConfig | None:
    """Returns the cluster that the environment describes, or None if it describes none.

    It looks for `TF_CONFIG` first, then for a Slurm step of more than one task, then for Kubernetes, where
    `TFDIST_NUM_WORKERS` or `TFDIST_SERVICE` is set.

    Args:
        environ: The environment. Defaults to `os.environ`.

    Raises:
        ValueError: If a description is wrong or incomplete.

    >>> detect({}) is None
    True
    >>> detect({"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}'}).source
    'TF_CONFIG'
    """
    environ = os.environ if environ is None else environ
    if has_tf_config(environ):
        return from_tf_config(environ)
    if is_slurm_step(environ):
        return from_slurm(environ)
    if is_kubernetes_cluster(environ):
        return from_kubernetes(environ)
    return None
