"""What each process of a run is: its name, what it runs, and what its exit means."""

import dataclasses
import sys
from collections.abc import Iterable, Mapping, Sequence

from tfdist.cluster import ClusterSpec, Task
from tfdist.utils.formatting import counted

SERVER_COMMAND = (sys.executable, "-m", "tfdist.servers")
_NOUNS = {"chief": "chief", "worker": "worker", "ps": "parameter server"}


@dataclasses.dataclass(frozen=True)
class Role:
    """What one process of a run is.

    The run ends when no process that runs the script is left. A worker beside parameter servers is restarted alone. A
    process that holds variables for the chief must not exit, because they are lost with it.
    """

    task: Task  # its task in the cluster
    name: str  # its name in messages
    label: str  # prefix of its output lines
    log_name: str  # name of its log file
    # whether it runs the user's script; otherwise it runs TensorFlow's server (`tfdist.servers`)
    runs_script: bool = True
    is_restarted_alone: bool = False  # whether it is restarted when it exits, while the other processes continue
    computes: bool = True  # whether it shares the cores with the others

    @property
    def is_server(self) -> bool:
        """Whether it holds variables, which are lost when it exits: a parameter server, or a worker with stages."""
        return not self.runs_script and not self.is_restarted_alone


def worker_roles(workers: int, first_rank: int = 0) -> dict[int, Role]:
    """Returns the roles of workers that all run the script, by rank.

    >>> [role] = worker_roles(1, 3).values()
    >>> role.name, role.label, role.log_name
    ('worker 3', '3', 'rank-3.log')
    """
    tasks = [Task("worker", rank) for rank in range(first_rank, first_rank + workers)]
    return {task.index: Role(task, str(task), str(task.index), f"rank-{task.index}.log") for task in tasks}


def parameter_server_roles(workers: int, servers: int) -> dict[int, Role]:
    """Returns the roles of a chief, which runs the script, and of its workers and parameter servers, by rank.

    >>> [role.name for role in parameter_server_roles(2, 1).values()]
    ['chief', 'worker 0', 'worker 1', 'ps 0']
    """
    tasks = [*(Task("worker", index) for index in range(workers)), *(Task("ps", index) for index in range(servers))]
    return _with_chief(Role(Task("chief", 0), "chief", "chief", "chief.log"), tasks, restarted_alone="worker")


def chief_and_worker_roles(workers: int) -> dict[int, Role]:
    """Returns the roles of a chief, which runs the script, and of workers, which hold the stages of its model, by rank.

    >>> [role.name for role in chief_and_worker_roles(2).values()]
    ['chief', 'worker 0', 'worker 1']
    """
    chief = Role(Task("chief", 0), "chief", "chief", "chief.log", computes=False)  # its workers hold the model
    return _with_chief(chief, [Task("worker", index) for index in range(workers)])


def run_roles(workers: int, *, parameter_servers: int = 0, has_chief: bool = False) -> dict[int, Role]:
    """Returns the roles of a run, by rank.

    Parameter servers imply a chief. With `has_chief` the workers hold the stages of its model.
    """
    if parameter_servers:
        return parameter_server_roles(workers, parameter_servers)
    return chief_and_worker_roles(workers) if has_chief else worker_roles(workers)


def _with_chief(chief: Role, tasks: Iterable[Task], restarted_alone: str = "") -> dict[int, Role]:
    servers = (
        Role(
            task,
            name=str(task),
            label=str(task),
            log_name=f"{task.type}-{task.index}.log",
            runs_script=False,
            is_restarted_alone=task.type == restarted_alone,
        )
        for task in tasks
    )
    return dict(enumerate([chief, *servers]))


def is_chief_with_workers(roles: Iterable[Role]) -> bool:
    """Whether the workers hold the stages of the chief's model.

    >>> is_chief_with_workers(chief_and_worker_roles(1).values()), is_chief_with_workers(worker_roles(2).values())
    (True, False)
    """
    return any(role.is_server and role.task.type == "worker" for role in roles)


def count_workers(roles: Mapping[int, Role]) -> int:
    """Returns the number of workers, without chief and parameter servers."""
    return sum(role.task.type == "worker" for role in roles.values())


def count_computing(roles: Mapping[int, Role]) -> int:
    """Returns the number of processes that share the cores.

    >>> count_computing(chief_and_worker_roles(2)), count_computing(parameter_server_roles(2, 1))
    (2, 4)
    """
    return sum(role.computes for role in roles.values())


def cluster_spec(roles: Iterable[Role], addresses: Sequence[str]) -> ClusterSpec:
    """Returns the cluster of processes at these addresses.

    >>> cluster_spec(parameter_server_roles(1, 1).values(), ["a:1", "a:2", "a:3"])
    ClusterSpec({'chief': ('a:1',), 'worker': ('a:2',), 'ps': ('a:3',)})
    """
    jobs: dict[str, list[str]] = {}
    for role, address in zip(roles, addresses, strict=True):
        jobs.setdefault(role.task.type, []).append(address)
    return ClusterSpec(jobs)


def describe_jobs(roles: Iterable[Role]) -> str:
    """Returns the number of processes of each kind.

    >>> describe_jobs(worker_roles(1).values()), describe_jobs(parameter_server_roles(2, 1).values())
    ('1 worker', '1 chief, 2 workers, 1 parameter server')
    """
    nouns = [_NOUNS[role.task.type] for role in roles]
    counts = {noun: nouns.count(noun) for noun in nouns}
    return ", ".join(counted(count, noun) for noun, count in counts.items())
