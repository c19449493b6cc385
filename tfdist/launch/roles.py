"""What each process of a run is: how it is called, what it runs, and what its end means."""

import dataclasses
import sys
from collections.abc import Sequence

from tfdist.cluster import ClusterSpec, Task

SERVER_COMMAND = (sys.executable, "-m", "tfdist.parameter_server")
_NOUNS = {"chief": "chief", "worker": "worker", "ps": "parameter server"}


@dataclasses.dataclass(frozen=True)
class Role:
    """What one process of a run is.

    The run ends when no process that runs the script is left. Of the others, a worker's end means nothing but that it
    is started again, and any end of a parameter server by itself is a failure: what it held is gone.

    Args:
        task: Its place in the cluster.
        name: What users are told.
        label: What stands before its lines.
        log_name: The name of its log file.
        runs_script: Whether it runs the user's script; else TensorFlow's server (`tfdist.parameter_server`).
        is_replaced: Whether it is started again alone when it has ended.
    """

    task: Task
    name: str
    label: str
    log_name: str
    runs_script: bool = True
    is_replaced: bool = False

    @property
    def is_server(self) -> bool:
        """Whether it holds variables, which are gone when it ends."""
        return self.task.type == "ps"


def peers(workers: int, first_rank: int = 0) -> tuple[Role, ...]:
    """Returns the roles of workers that are all alike, by rank.

    Args:
        workers: Number of workers.
        first_rank: The rank of the first of them.

    >>> [role] = peers(1, 3)
    >>> role.name, role.label, role.log_name
    ('worker 3', '3', 'rank-3.log')
    """
    tasks = [Task("worker", rank) for rank in range(first_rank, first_rank + workers)]
    return tuple(Role(task, str(task), str(task.index), f"rank-{task.index}.log") for task in tasks)


def with_parameter_servers(workers: int, servers: int) -> tuple[Role, ...]:
    """Returns the roles of a chief, which runs the script, and of the workers and servers that it uses.

    >>> [role.name for role in with_parameter_servers(2, 1)]
    ['chief', 'worker 0', 'worker 1', 'ps 0']
    """
    used = [*(Task("worker", index) for index in range(workers)), *(Task("ps", index) for index in range(servers))]
    return (
        Role(Task("chief", 0), "chief", "chief", "chief.log"),
        *(
            Role(
                task,
                name=str(task),
                label=str(task),
                log_name=f"{task.type}-{task.index}.log",
                runs_script=False,
                is_replaced=task.type == "worker",
            )
            for task in used
        ),
    )


def cluster_of(roles: Sequence[Role], addresses: Sequence[str]) -> ClusterSpec:
    """Returns the cluster of processes at these addresses.

    >>> cluster_of(with_parameter_servers(1, 1), ["a:1", "a:2", "a:3"])
    ClusterSpec({'chief': ('a:1',), 'worker': ('a:2',), 'ps': ('a:3',)})
    """
    jobs: dict[str, list[str]] = {}
    for role, address in zip(roles, addresses, strict=True):
        jobs.setdefault(role.task.type, []).append(address)
    return ClusterSpec(jobs)


def describe_jobs(roles: Sequence[Role]) -> str:
    """Returns how many there are of what.

    >>> describe_jobs(peers(1)), describe_jobs(with_parameter_servers(2, 1))
    ('1 worker', '1 chief, 2 workers, 1 parameter server')
    """
    nouns = [_NOUNS[role.task.type] for role in roles]
    counts = {noun: nouns.count(noun) for noun in nouns}
    return ", ".join(f"{count} {noun}" if count == 1 else f"{count} {noun}s" for noun, count in counts.items())
