"""The cluster that TF_CONFIG, Slurm or Kubernetes describe. Imports only the standard library.

>>> from tfdist import cluster
>>> cluster.detect({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) is None  # a batch script, not a step
True
"""

from tfdist.cluster.cluster_spec import ClusterConfig, ClusterSpec, Task
from tfdist.cluster.detect import detect
from tfdist.cluster.heartbeat import Heartbeat
from tfdist.cluster.kubernetes import from_kubernetes, is_kubernetes_cluster
from tfdist.cluster.run_seed import SEED_VARIABLE, new_seed, seed_of_run
from tfdist.cluster.slurm import expand_hostlist, expand_tasks_per_node, from_slurm, is_slurm_step
from tfdist.cluster.tf_config import from_tf_config, has_tf_config
from tfdist.cluster.wait_for_peers import wait_for_peers, why_unreachable

__all__ = [
    "LOST_RUN_EXIT_CODE",
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

LOST_RUN_EXIT_CODE = 69
"""`tfdist run --nodes` has lost the connection to the other nodes: start it again to rejoin them.

EX_UNAVAILABLE of sysexits.h.
"""
