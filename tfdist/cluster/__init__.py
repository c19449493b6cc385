"""The cluster that TF_CONFIG, Slurm or Kubernetes describe. Imports only the standard library.

>>> from tfdist import cluster
>>> cluster.detect({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) is None  # a batch script, not a step
True
"""

import os
from collections.abc import Mapping

from tfdist.cluster.cluster_spec import ClusterConfig, ClusterSpec, Task
from tfdist.cluster.heartbeat import Heartbeat
from tfdist.cluster.kubernetes import from_kubernetes, is_kubernetes_cluster
from tfdist.cluster.run_seed import SEED_VARIABLE, new_seed, seed_of_run
from tfdist.cluster.slurm import expand_hostlist, expand_tasks_per_node, from_slurm, is_slurm_step
from tfdist.cluster.tf_config import from_tf_config, has_tf_config
from tfdist.cluster.wait_for_peers import wait_for_peers, why_unreachable
from tfdist.utils.argument_checks import optional_integer_variable

__all__ = [
    "LOST_RUN_EXIT_CODE",
    "MEMORY_VARIABLE",
    "PREEMPTED_EXIT_CODE",
    "SEED_VARIABLE",
    "ClusterConfig",
    "ClusterSpec",
    "Heartbeat",
    "Task",
    "detect",
    "expand_hostlist",
    "expand_tasks_per_node",
    "from_kubernetes",
    "from_slurm",
    "from_tf_config",
    "has_tf_config",
    "is_kubernetes_cluster",
    "is_slurm_step",
    "new_seed",
    "seed_of_run",
    "wait_for_peers",
    "why_unreachable",
]

PREEMPTED_EXIT_CODE = 75
"""A worker, or `tfdist run`, was preempted and has saved: start it again to resume.

EX_TEMPFAIL of sysexits.h. Shells, Python and TensorFlow do not use it.
"""

MEMORY_VARIABLE = "TFDIST_MEMORY"
"""The environment variable by which `tfdist run` tells its workers a directory in memory that outlives them."""

LOST_RUN_EXIT_CODE = 69
"""`tfdist run --nodes` has lost the connection to the other nodes: start it again to rejoin them.

EX_UNAVAILABLE of sysexits.h.
"""


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


def requested_workers() -> int | None:
    """Returns the number of workers that `tfdist run` was to start; None under other launchers.

    Raises:
        ValueError: If TFDIST_FULL_WORKERS is not an integer.
    """
    remedy = "Start the workers with `tfdist run`, which sets it, or unset it."
    return optional_integer_variable(os.environ, "TFDIST_FULL_WORKERS", remedy=remedy)
