"""Dataclasses of a cluster: its tasks, their addresses, and the task of this process."""

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

TASK_TYPES = ("chief", "worker", "ps", "evaluator")
_SINGLE_TASK_TYPES = ("chief", "evaluator")
_WORKER_TYPES = ("chief", "worker")
_ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%\w]+\]|[^\s:/\[\]]+):(?P<port>[0-9]+)")


@dataclasses.dataclass(frozen=True)
class Task:
    """One process of a cluster.

    Args:
        type: One of `TASK_TYPES`.
        index: Index in the job of that type, from 0.

    Raises:
        ValueError: If the type is unknown, or the index is not an integer of at least 0.
    """

    type: str
    index: int

    def __post_init__(self) -> None:
        _check_task_type(self.type)
        if isinstance(self.index, bool) or not isinstance(self.index, int) or self.index < 0:
            raise ValueError(
                f"The index of a task must be an integer of at least 0. Received: index={self.index!r} of task type "
                f"{self.type!r}. Expected: the index of this process in its job, for example 0. Write the number "
                "without quotes."
            )

    def __str__(self) -> str:
        return f"{self.type} {self.index}"


@dataclasses.dataclass(frozen=True)
class ClusterSpec:
    """The addresses of all tasks, by job name.

    Args:
        jobs: The `"host:port"` addresses of the tasks, by job name (one of `TASK_TYPES`), then by index.

    Raises:
        ValueError: If a job name is unknown, a job is empty, an address is malformed or belongs to two tasks.

    >>> cluster = ClusterSpec({"worker": ["a:2222", "b:2222"], "chief": ["c:2222"]})
    >>> cluster.num_workers
    3
    >>> [str(task) for task in cluster.workers]
    ['chief 0', 'worker 0', 'worker 1']
    >>> cluster.rank(Task("worker", 1))
    2
    """

    jobs: Mapping[str, tuple[str, ...]]

    def __init__(self, jobs: Mapping[str, Iterable[str]]) -> None:
        if not isinstance(jobs, Mapping) or not jobs:
            raise ValueError(
                f"A cluster needs at least one job. Received: cluster={jobs!r}. Expected: a dictionary from job name "
                'to addresses, for example {"worker": ["host0:2222", "host1:2222"]}. For training in one process '
                "describe no cluster."
            )
        checked = {name: _checked_addresses(name, addresses) for name, addresses in jobs.items()}
        _check_no_shared_address(checked)
        object.__setattr__(self, "jobs", MappingProxyType(checked))

    def __hash__(self) -> int:
        return hash(frozenset(self.jobs.items()))

    def __repr__(self) -> str:
        return f"ClusterSpec({dict(self.jobs)!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return ClusterSpec, (dict(self.jobs),)

    @property
    def workers(self) -> tuple[Task, ...]:
        """The tasks that train together, by rank as in TensorFlow: the chief, then the workers."""
        return tuple(Task(name, i) for name in _WORKER_TYPES for i in range(len(self.jobs.get(name, ()))))

    @property
    def num_workers(self) -> int:
        """The number of workers, including the chief."""
        return len(self.workers)

    @property
    def num_parameter_servers(self) -> int:
        return len(self.jobs.get("ps", ()))

    def rank(self, task: Task) -> int:
        """Returns the index of `task` in `workers`.

        Raises:
            ValueError: If the task is not a worker of this cluster.
        """
        try:
            return self.workers.index(task)
        except ValueError:
            raise ValueError(
                f"Only the chief and the workers of a cluster have a rank. Received: {task}. Expected: one of "
                f"{', '.join(map(str, self.workers)) or 'none, the cluster has no worker'}."
            ) from None

    def address(self, task: Task) -> str:
        """Returns the `"host:port"` of `task`.

        Raises:
            ValueError: If the cluster has no such task.
        """
        addresses = self.jobs.get(task.type, ())
        if task.index >= len(addresses):
            raise ValueError(f"The cluster has no such task. Received: {task}. Expected: {self._describe_tasks()}.")
        return addresses[task.index]

    def _describe_tasks(self) -> str:
        return " or ".join(f"{name} 0..{len(addresses) - 1}" for name, addresses in self.jobs.items())


@dataclasses.dataclass(frozen=True)
class ClusterConfig:
    """A cluster, and the task of this process.

    Args:
        cluster: All tasks.
        task: The task of this process. Every task except an evaluator needs an address in the cluster.
        source: Origin of the description, for messages: `"TF_CONFIG"`, `"Slurm"`, `"Kubernetes"`.

    Raises:
        ValueError: If the cluster has no such task.

    >>> config = ClusterConfig(ClusterSpec({"worker": ["a:2222", "b:2222"]}), Task("worker", 1))
    >>> config.rank, config.num_workers, config.is_chief, config.address
    (1, 2, False, 'b:2222')
    >>> config.to_tf_config()
    '{"cluster": {"worker": ["a:2222", "b:2222"]}, "task": {"type": "worker", "index": 1}}'
    """

    cluster: ClusterSpec
    task: Task
    source: str = dataclasses.field(default="", compare=False)

    def __post_init__(self) -> None:
        addresses = self.cluster.jobs.get(self.task.type, ())
        if self.task.index < len(addresses) or (self.task.type == "evaluator" and not addresses):
            return
        if not addresses:
            raise ValueError(
                f"The task's type is not in the cluster. Received: task {self.task}, cluster jobs "
                f"{sorted(self.cluster.jobs)}. Expected: {self.cluster._describe_tasks()}. Add the job "
                f"{self.task.type!r} to the cluster or correct the task's type."
            )
        raise ValueError(
            f"The task's index is out of range. Received: task {self.task} of a job with {len(addresses)} "
            f"address(es). Expected: {self.cluster._describe_tasks()}. Count from 0, give every process its own index "
            "and list the address of each in the cluster."
        )

    @property
    def rank(self) -> int:
        """The rank of this task (see `ClusterSpec.rank`)."""
        return self.cluster.rank(self.task)

    @property
    def num_workers(self) -> int:
        return self.cluster.num_workers

    @property
    def is_chief(self) -> bool:
        """Whether this task is the chief, or worker 0 if the cluster has no chief job."""
        return self.task in self.cluster.workers[:1]

    @property
    def address(self) -> str:
        return self.cluster.address(self.task)

    def to_tf_config(self) -> str:
        """Returns the JSON that TensorFlow expects in the environment variable `TF_CONFIG`."""
        cluster = {name: list(addresses) for name, addresses in self.cluster.jobs.items()}
        return json.dumps({"cluster": cluster, "task": {"type": self.task.type, "index": self.task.index}})


def _check_task_type(task_type: object) -> None:
    if not isinstance(task_type, str) or task_type not in TASK_TYPES:
        hint = " 'master' is the old name of 'chief'." if task_type == "master" else ""
        raise ValueError(
            f"Unknown task type. Received: {task_type!r}. Expected: one of {', '.join(TASK_TYPES)}.{hint} Rename it in "
            "the cluster and in the task."
        )


def _checked_addresses(job: str, addresses: object) -> tuple[str, ...]:
    _check_task_type(job)
    if isinstance(addresses, (str, bytes, Mapping)) or not isinstance(addresses, Iterable):
        raise ValueError(
            f"The addresses of a job must be a list. Received: {addresses!r} for job {job!r}. Expected: a list of "
            f'"host:port" strings by index, for example {{"{job}": ["host0:2222"]}}.'
        )
    listed = tuple(addresses)
    if not listed:
        raise ValueError(
            f"A job needs at least one address. Received: an empty list for job {job!r}. Expected: a "
            '"host:port" string for each task. Remove jobs without tasks.'
        )
    if job in _SINGLE_TASK_TYPES and len(listed) > 1:
        raise ValueError(
            f"A cluster has at most one {job}. Received: {len(listed)} addresses for job {job!r}: {list(listed)}. "
            "Expected: one address. List the others under 'worker'."
        )
    for index, address in enumerate(listed):
        _check_address(address, f"{job} {index}")
    return listed


def _check_address(address: object, task: str) -> None:
    match = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
    if match is None:
        raise ValueError(
            f'An address must be a host and a port. Received: {address!r} for {task}. Expected: "host:port", for '
            'example "10.0.0.1:2222" or "[::1]:2222", without a scheme such as grpc://. Add the port, the same in '
            "the description of every process."
        )
    if not 1 <= int(match["port"]) <= 65535:
        raise ValueError(
            f"A port must be between 1 and 65535. Received: {address!r} for {task}. Expected: a free port of that "
            "host, for example 2222."
        )


def _check_no_shared_address(jobs: Mapping[str, tuple[str, ...]]) -> None:
    owners: dict[str, str] = {}
    for job, addresses in jobs.items():
        for index, address in enumerate(addresses):
            task = f"{job} {index}"
            owner = owners.setdefault(address.lower(), task)
            if owner != task:
                raise ValueError(
                    f"Two tasks have the same address. Received: {address!r} for {owner} and for {task}. Expected: "
                    "different addresses. Give tasks on one host different ports."
                )
