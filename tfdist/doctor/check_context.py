"""What the checks know about the machine, the cluster and the planned training."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

import tfdist
from tfdist.cluster import ClusterConfig, Task
from tfdist.utils.cores_and_ports import host_and_port


@dataclasses.dataclass(frozen=True)
class CheckContext:
    """What the checks know."""

    environ: Mapping[str, str]  # environment of the training
    cores: int  # number of cores that this process may use
    config: ClusterConfig | None = None  # the cluster and this task; None: no cluster
    workers: int = 1  # number of workers on this machine
    parameters: int = 10_000_000  # number of parameters of the model
    checkpoints: Path | None = None  # directory for checkpoints, or None
    object_store: str | None = None  # address for checkpoints, or None
    keep: int = 3  # number of checkpoints that are kept
    root: Path = Path("/")  # directory that contains `proc`, `sys` and `dev`

    @property
    def addresses(self) -> dict[str, str]:
        """Address of each task, for example of `"worker 1"`: the workers by rank, then all other tasks."""
        if self.config is None:
            return {}
        cluster = self.config.cluster
        others = (Task(job, index) for job, addresses in cluster.jobs.items() for index in range(len(addresses)))
        return {str(task): cluster.address(task) for task in dict.fromkeys([*cluster.workers, *others])}

    @property
    def task(self) -> str:
        """This task, for example `"worker 0"`; empty without a cluster."""
        return "" if self.config is None else str(self.config.task)

    @property
    def training_state_bytes(self) -> int:
        """Size of a checkpoint: weights and Adam's two moments, in float32."""
        return 3 * 4 * self.parameters


def workers_on_own_host(config: ClusterConfig) -> int:
    """Returns how many workers have the host of this task in their address; at least 1.

    >>> from tfdist.cluster import ClusterSpec, Task
    >>> workers_on_own_host(ClusterConfig(ClusterSpec({"worker": ["a:1", "b:1", "a:2"]}), Task("worker", 0)))
    2
    """
    if config.task.type not in config.cluster.jobs:
        return 1
    own_host = host_of(config.address)
    return max(1, sum(host_of(config.cluster.address(task)) == own_host for task in config.cluster.workers))


def host_of(address: str) -> str:
    """Returns the host of `"host:port"`.

    >>> host_of("[::1]:2222")
    '::1'
    """
    return host_and_port(address)[0].lower()


def python_path(environ: Mapping[str, str]) -> str:
    """Returns `PYTHONPATH` of a child process that imports this tfdist."""
    return os.pathsep.join([str(Path(tfdist.__file__).parents[1]), environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
