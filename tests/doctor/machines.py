"""Descriptions of machines, for the checks."""

from tfdist.cluster import ClusterConfig, ClusterSpec, Task
from tfdist.doctor.check_context import CheckContext
from tfdist.doctor.report import Finding


def context(*addresses, task=0, **facts):
    """The context on a machine; with addresses, it is worker `task` of that cluster."""
    config = ClusterConfig(ClusterSpec({"worker": addresses}), Task("worker", task)) if addresses else None
    return CheckContext(facts.pop("environ", {}), **{"cores": 2, "config": config, **facts})


def write(root, files):
    """Writes files, by path below `root`, and returns `root`."""
    for path, content in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(content)
    return root


def one(findings) -> Finding:
    """The only finding."""
    [finding] = findings
    return finding
