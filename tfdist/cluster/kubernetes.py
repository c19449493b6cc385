"""The cluster of the pods of an Indexed Job or a StatefulSet behind a headless service.

| variable              | meaning                                                                            |
|-----------------------|------------------------------------------------------------------------------------|
| `TFDIST_NUM_WORKERS`  | number of pods (`completions` of the Job, `replicas` of the StatefulSet)           |
| `TFDIST_SERVICE`      | name of the headless service, the pods' `subdomain`                                |
| `TFDIST_PORT`         | port of every worker, 2222 if not set                                              |
| `TFDIST_JOB_NAME`     | part of the pods' host names before the index; from `HOSTNAME` if not set          |
| `JOB_COMPLETION_INDEX`| index, set by Kubernetes in an Indexed Job; otherwise the end of `HOSTNAME`        |

A pod's address is `<name>-<index>.<service>:<port>`. A cluster is described if one of the
first two variables is set.
"""

import os
import re
from collections.abc import Mapping

from tfdist.cluster.cluster_spec import ClusterConfig, ClusterSpec, Task
from tfdist.utils.argument_checks import integer_variable, optional_integer_variable, required_variable

DEFAULT_PORT = 2222
_HOSTNAME = re.compile(r"(?P<name>[^.]+)-(?P<index>\d+)(?:\..*)?")
_REMEDY = (
    "Set TFDIST_NUM_WORKERS to the number of pods and TFDIST_SERVICE to the headless service (the pods' subdomain), or "
    "unset both for training in one process."
)


def is_kubernetes_cluster(environ: Mapping[str, str] | None = None) -> bool:
    """Whether `TFDIST_NUM_WORKERS` or `TFDIST_SERVICE` is set."""
    environ = os.environ if environ is None else environ
    return any(environ.get(name, "").strip() for name in ("TFDIST_NUM_WORKERS", "TFDIST_SERVICE"))


def from_kubernetes(environ: Mapping[str, str] | None = None) -> ClusterConfig:
    """Reads the cluster from the environment of a pod (see the module's table).

    Args:
        environ: The environment. Defaults to `os.environ`.

    Raises:
        ValueError: If a variable is missing or contradicts another.

    >>> config = from_kubernetes({"TFDIST_NUM_WORKERS": "2", "TFDIST_SERVICE": "train", "HOSTNAME": "digits-1"})
    >>> config.cluster.jobs["worker"]
    ('digits-0.train:2222', 'digits-1.train:2222')
    >>> config.rank
    1
    """
    environ = os.environ if environ is None else environ
    num_workers = integer_variable(environ, "TFDIST_NUM_WORKERS", remedy=_REMEDY)
    if num_workers < 1:
        raise ValueError(
            f"A cluster needs at least one worker. Received: TFDIST_NUM_WORKERS={num_workers}. Expected: the number "
            f"of pods. {_REMEDY}"
        )
    service = required_variable(environ, "TFDIST_SERVICE", remedy=_REMEDY)
    port = optional_integer_variable(environ, "TFDIST_PORT", remedy="Set it to the port of every worker, or unset it.")
    name, index = _identity(environ)
    if index >= num_workers:
        raise ValueError(
            f"This pod's index is out of range. Received: index {index} with TFDIST_NUM_WORKERS={num_workers}. "
            f"Expected: 0 to {num_workers - 1}. Set TFDIST_NUM_WORKERS to the Job's completions or the StatefulSet's "
            "replicas, and let its ordinals start at 0."
        )
    addresses = [f"{name}-{i}.{service}:{DEFAULT_PORT if port is None else port}" for i in range(num_workers)]
    return ClusterConfig(ClusterSpec({"worker": addresses}), Task("worker", index), source="Kubernetes")


def _identity(environ: Mapping[str, str]) -> tuple[str, int]:
    name = environ.get("TFDIST_JOB_NAME", "").strip()
    index = optional_integer_variable(environ, "JOB_COMPLETION_INDEX", remedy="Kubernetes sets it in an Indexed Job.")
    if name and index is not None:
        return name, index
    hostname = environ.get("HOSTNAME", "").strip()
    match = _HOSTNAME.fullmatch(hostname)
    if match is None:
        raise ValueError(
            f"The pod's host name does not end in its index. Received: HOSTNAME={hostname!r}. Expected: "
            "'<name>-<index>' as in a StatefulSet or a Job with completionMode: Indexed. Use one of these, or set "
            "TFDIST_JOB_NAME in an Indexed Job."
        )
    return name or match["name"], int(match["index"]) if index is None else index
