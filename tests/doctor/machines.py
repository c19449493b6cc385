"""Machines as a check sees them, described by tests."""

from tfdist.cluster import ClusterConfig, ClusterSpec, Task
from tfdist.doctor.finding import Finding
from tfdist.doctor.situation import Situation


def situation(*addresses, task=0, **facts):
    """What is known on a machine, which is worker `task` of a cluster where addresses of workers are given."""
    config = ClusterConfig(ClusterSpec({"worker": addresses}), Task("worker", task)) if addresses else None
    return Situation(facts.pop("environ", {}), **{"cores": 2, "config": config, **facts})


def write(root, files):
    """Writes files, by path below `root`, which is returned."""
    for path, content in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(content)
    return root


def one(findings) -> Finding:
    """The only finding."""
    [finding] = findings
    return finding
