"""Which processes train together, as TF_CONFIG, Slurm or Kubernetes describe it. Standard library only.

>>> from tfdist import cluster
>>> cluster.detect({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) is None  # a batch script, not a step
True
"""

from tfdist.cluster.detect import detect
from tfdist.cluster.hostlist import expand_hostlist, expand_tasks_per_node
from tfdist.cluster.kubernetes import from_kubernetes, is_kubernetes_cluster
from tfdist.cluster.rendezvous import wait_for_peers, why_unreachable
from tfdist.cluster.slurm import from_slurm, is_slurm_step
from tfdist.cluster.spec import ClusterConfig, ClusterSpec, Task
from tfdist.cluster.tf_config import from_tf_config, has_tf_config

__all__ = [
    "ClusterConfig",
    "ClusterSpec",
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
    "wait_for_peers",
    "why_unreachable",
]
