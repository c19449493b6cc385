"""What a run is: its processes, and the options of `tfdist run` as one value, made once by whoever starts the run."""

import argparse
import dataclasses
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfdist.cluster import Task
from tfdist.utils.argument_checks import check_seconds, check_seed, check_whole_number
from tfdist.utils.formatting import counted

SERVER_COMMAND = (sys.executable, "-m", "tfdist.servers")
_NOUNS = {"chief": "chief", "worker": "worker", "ps": "parameter server"}


@dataclasses.dataclass(frozen=True)
class Role:
    """What one process of a run is.

    The run ends when no process that runs the script is left. A worker beside parameter servers, or of an elastic run,
    is restarted alone. A process that holds variables for the chief must not exit, because they are lost with it.

    >>> [role.is_elastic for role in run_roles(2, is_elastic=True).values()]
    [True, True]
    >>> roles = [Role(Task("worker", 3)), Role(Task("worker", 3), runs_script=False), Role(Task("chief", 0))]
    >>> [(role.name, role.label, role.log_name) for role in roles]
    [('worker 3', '3', 'rank-3.log'), ('worker 3', 'worker 3', 'worker-3.log'), ('chief', 'chief', 'chief.log')]
    """

    task: Task  # its task in the cluster
    # whether it runs the user's script; otherwise it runs TensorFlow's server (`tfdist.servers`)
    runs_script: bool = True
    is_restarted_alone: bool = False  # whether it is restarted when it exits, while the other processes continue
    computes: bool = True  # whether it shares the cores with the others

    @property
    def name(self) -> str:
        """Its name in messages."""
        return "chief" if self.task.type == "chief" else str(self.task)

    @property
    def label(self) -> str:
        """The prefix of its output lines."""
        return str(self.task.index) if self._is_worker_with_script else self.name

    @property
    def log_name(self) -> str:
        """The name of its log file."""
        return f"rank-{self.label}.log" if self._is_worker_with_script else f"{self.name.replace(' ', '-')}.log"

    @property
    def is_elastic(self) -> bool:
        """Whether it runs the script, and the others train on without it."""
        return self.runs_script and self.is_restarted_alone

    @property
    def may_be_the_cause(self) -> bool:
        """Whether other processes that run the script may fail because it is frozen."""
        return self.runs_script or not self.is_restarted_alone

    @property
    def is_server(self) -> bool:
        """Whether it holds variables, which are lost when it exits: a parameter server, or a worker with stages."""
        return not self.runs_script and not self.is_restarted_alone

    @property
    def _is_worker_with_script(self) -> bool:
        return self.runs_script and self.task.type == "worker"


def run_roles(
    workers: int, *, parameter_servers: int = 0, has_chief: bool = False, is_elastic: bool = False
) -> dict[int, Role]:
    """Returns the roles of a run, by rank: workers that all run the script, or what a chief, which runs it, uses.

    Parameter servers imply a chief. With `has_chief` the workers hold the stages of its model. With `is_elastic`
    workers that run the script are restarted alone.

    >>> [role.name for role in run_roles(2, parameter_servers=1).values()]
    ['chief', 'worker 0', 'worker 1', 'ps 0']
    """
    tasks = [Task("worker", index) for index in range(workers)]
    if not parameter_servers and not has_chief:
        return {rank: Role(task, is_restarted_alone=is_elastic) for rank, task in enumerate(tasks)}
    chief = Role(Task("chief", 0), computes=parameter_servers > 0)  # other workers hold its model
    worker_roles = [Role(task, runs_script=False, is_restarted_alone=parameter_servers > 0) for task in tasks]
    servers = [Role(Task("ps", index), runs_script=False) for index in range(parameter_servers)]
    return dict(enumerate([chief, *worker_roles, *servers]))


def count_workers(roles: Mapping[int, Role]) -> int:
    """Returns the number of workers, without chief and parameter servers."""
    return sum(role.task.type == "worker" for role in roles.values())


def count_computing(roles: Mapping[int, Role]) -> int:
    """Returns the number of processes that share the cores.

    >>> count_computing(run_roles(2, has_chief=True)), count_computing(run_roles(2, parameter_servers=1))
    (2, 4)
    """
    return sum(role.computes for role in roles.values())


def describe_jobs(roles: Iterable[Role]) -> str:
    """Returns the number of processes of each kind.

    >>> describe_jobs(run_roles(1).values()), describe_jobs(run_roles(2, parameter_servers=1).values())
    ('1 worker', '1 chief, 2 workers, 1 parameter server')
    """
    nouns = [_NOUNS[role.task.type] for role in roles]
    counts = {noun: nouns.count(noun) for noun in nouns}
    return ", ".join(counted(count, noun) for noun, count in counts.items())


TOKEN_VARIABLE = "TFDIST_TOKEN"
START_TIMEOUT_SECONDS = 300.0
# Kubernetes and Slurm send SIGKILL 30 s after SIGTERM by default: the launcher has to exit before.
STOP_GRACE_SECONDS = 25.0
FAILURE_GRACE_SECONDS = 5.0
# Before a restart the state of the other workers is useless, and most of them are blocked and do not handle SIGTERM.
RESTART_GRACE_SECONDS = 0.5
_HEARTBEAT_SECONDS = 1.0
_HEARTBEATS_PER_TIMEOUT = 4


@dataclasses.dataclass(frozen=True)
class GracePeriods:
    """How long workers have to exit, in seconds."""

    stop: float  # time to save and exit after a signal to this command
    failure: float  # time to exit after the failure of another worker
    patience: float  # time to show the root cause after another worker reported a lost peer


@dataclasses.dataclass(frozen=True)
class RunSpec:
    """The options of `tfdist run` that describe a run, by their names, and what identifies it. Times are in seconds.

    >>> RunSpec(workers=2, chief=True, grace=7.0).arguments()
    ['--workers', '2', '--chief', '--grace', '7']
    >>> RunSpec(workers=3, elastic=1, most_workers=4).arguments()
    ['--workers', '3', '--elastic', '1:4']
    """

    # number of workers of each host, in the call of an engine of all places together; 0: as a plan says
    workers: int = 0
    parameter_servers: int = 0  # of all hosts together; with any, the first host also starts their chief
    # whether the first host also starts a chief, for which all workers run TensorFlow's server and hold stages
    chief: bool = False
    nodes: int = 1  # number of hosts
    max_restarts: int = 0
    min_workers: int | None = None  # least number of workers of all hosts together; None: all
    # least number of workers of all hosts together that train: a worker that is lost is restarted alone; None: all are
    elastic: int | None = None
    most_workers: int | None = None  # with `elastic`, the largest number of workers; None: that of the beginning
    # how often a worker that is restarted alone is restarted in an attempt; None: no limit
    worker_restarts: int | None = None
    restart_delay: float = 1.0  # from a failure to the next start, after an attempt without progress
    warm_spares: bool = False  # whether to keep processes for the next attempt that have imported TensorFlow
    seed: int | None = None  # None: TFDIST_SEED, or a new one
    # from SIGTERM to SIGKILL. None: 25 s after a signal to the command, 5 s after a failure.
    grace: float | None = None
    start_timeout: float | None = None  # for peers and hosts to start; None: TFDIST_START_TIMEOUT, or 300 s
    rejoin_timeout: float | None = None  # for lost hosts to join again; None: `start_timeout`
    heartbeat_timeout: float = 10.0  # silence after which a worker is frozen, or a host lost; 0: never
    stall_timeout: float = 600.0  # minimum time without a step of any worker that is a stall; 0: never
    threads_per_worker: int | None = None
    network: str = "auto"
    control_socket: str | Path | None = None  # where an elastic run listens for `tfdist resize`
    log_dir: str | Path | None = None
    error_file: str | Path | None = None
    run_id: str = ""  # the command chooses it, and the seed that the run has
    run_seed: int = 0

    @classmethod
    def of_options(cls, options: argparse.Namespace, **chosen: Any) -> "RunSpec":
        """Returns the run that parsed options describe, with what the command has chosen."""
        names = [field.name for field in dataclasses.fields(cls) if hasattr(options, field.name)]
        return cls(**{name: getattr(options, name) for name in names} | chosen)

    @classmethod
    def of_call(
        cls,
        *,
        workers: Any,
        parameter_servers: Any = 0,
        chief: Any = False,
        elastic: Any = None,
        max_restarts: Any = 0,
        threads_per_worker: Any = None,
        seed: Any = None,
        network: str = "host",
        log_dir: str | os.PathLike[str] | None = None,
        grace_seconds: Any = 5.0,
        start_timeout_seconds: Any = None,
    ) -> "RunSpec":
        """Checks arguments of `from_notebook`, `on_ray`, `on_spark` or `on_dask`, and returns the run.

        >>> RunSpec.of_call(workers=2, log_dir=b"logs").log_dir
        'logs'
        """
        check_whole_number("workers", workers, at_least=1)
        check_whole_number("parameter_servers", parameter_servers, at_least=0)
        check_whole_number("max_restarts", max_restarts, at_least=0)
        if threads_per_worker is not None:
            check_whole_number("threads_per_worker", threads_per_worker, at_least=1)
        if seed is not None:
            check_seed(seed)
        check_seconds("grace_seconds", grace_seconds)
        if start_timeout_seconds is not None:
            check_seconds("start_timeout_seconds", start_timeout_seconds)
            if not start_timeout_seconds:
                raise ValueError(
                    f"Invalid `start_timeout_seconds`. Received: start_timeout_seconds={start_timeout_seconds}. "
                    "Expected: a number of seconds above 0, such as 300."
                )
        if chief and parameter_servers:
            raise ValueError(
                f"Parameter servers have a chief already. Received: chief={chief!r} with parameter_servers="
                f"{parameter_servers}. Expected: one of them. Remove `chief` for ParameterServerStrategy, "
                "`parameter_servers` for ModelParallelStrategy."
            )
        if elastic is not None:
            check_whole_number("elastic", elastic, at_least=1)
            if chief or parameter_servers:
                raise ValueError(
                    "Only workers that all call the function train elastically. Received: "
                    f"elastic={elastic} with chief={chief!r}, parameter_servers={parameter_servers}. Expected: one of "
                    "them. Remove `elastic`, or use MultiWorkerMirroredStrategy without a chief."
                )
        return cls(
            workers=workers,
            parameter_servers=parameter_servers,
            chief=bool(chief),
            elastic=elastic,
            max_restarts=max_restarts,
            seed=seed,
            grace=float(grace_seconds),
            start_timeout=None if start_timeout_seconds is None else float(start_timeout_seconds),
            threads_per_worker=threads_per_worker,
            network=network,
            log_dir=None if log_dir is None else os.fsdecode(log_dir),
        )

    def arguments(self) -> list[str]:
        """Returns the options of `tfdist run` for this run, without those that have their defaults."""
        arguments: list[str] = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "elastic" and self.most_workers is not None:
                value = f"{value}:{self.most_workers}"
            if value != field.default and field.name != "most_workers":
                arguments.append(f"--{field.name.replace('_', '-')}")
                if value is not True:
                    arguments.append(f"{value:g}" if isinstance(value, float) else str(value))
        return arguments

    @property
    def start_timeout_seconds(self) -> float:
        """How long to wait for workers and hosts that have not started yet."""
        return START_TIMEOUT_SECONDS if self.start_timeout is None else self.start_timeout

    @property
    def grace_seconds(self) -> float:
        """How long workers have to exit after a failure."""
        return FAILURE_GRACE_SECONDS if self.grace is None else self.grace

    @property
    def calls(self) -> int:
        """How many processes run the script, or call the function: all workers, or the chief."""
        return 1 if self.chief or self.parameter_servers else self.workers

    @property
    def heartbeat_seconds(self) -> float:
        """Seconds between two heartbeats of a supervisor or of the coordinator."""
        limit = self.heartbeat_timeout
        return min(_HEARTBEAT_SECONDS, limit / _HEARTBEATS_PER_TIMEOUT) if limit else _HEARTBEAT_SECONDS

    @property
    def common_options(self) -> dict[str, int | None]:
        """The options that must be the same on all hosts, which the coordinator compares."""
        names = ("nodes", "max_restarts", "min_workers", "elastic", "chief", "parameter_servers", "seed")
        return {f"--{name.replace('_', '-')}": getattr(self, name) for name in names}

    def grace_periods(self, *, may_restart: bool) -> GracePeriods:
        """Returns how long workers have to exit; less after a failure that may be followed by a restart."""
        failure = self.grace_seconds
        return GracePeriods(
            stop=STOP_GRACE_SECONDS if self.grace is None else self.grace,
            failure=min(failure, RESTART_GRACE_SECONDS) if may_restart else failure,
            patience=failure,
        )

    def roles(self, workers: int) -> dict[int, Role]:
        """Returns the processes of an attempt with so many workers on all hosts together, by rank."""
        return run_roles(
            workers,
            parameter_servers=self.parameter_servers,
            has_chief=self.chief,
            is_elastic=self.elastic is not None,
        )

    def roles_of_nodes(self, shares: Sequence[int]) -> list[dict[int, Role]]:
        """Returns the processes of each host, by rank, given its number of workers, at least 1.

        The chief runs on the first node. Workers follow the order of the nodes. Each node in turn gets a parameter
        server, the first node first: so the network cards of all nodes carry the variables, and a single server is on
        the node whose loss ends the run anyway.

        >>> spec = RunSpec(parameter_servers=3)
        >>> [[role.name for role in roles.values()] for roles in spec.roles_of_nodes([1, 2])]
        [['chief', 'worker 0', 'ps 0', 'ps 2'], ['worker 1', 'worker 2', 'ps 1']]
        """
        nodes_by_job = {
            "chief": [0],
            "worker": [node for node, share in enumerate(shares) for _ in range(share)],
            "ps": [index % len(shares) for index in range(self.parameter_servers)],
        }
        roles_by_node: list[dict[int, Role]] = [{} for _ in shares]
        for rank, role in self.roles(sum(shares)).items():
            roles_by_node[nodes_by_job[role.task.type][role.task.index]][rank] = role
        return roles_by_node


@dataclasses.dataclass(frozen=True)
class NodeOptions:
    """One host of several."""

    rank: int  # number of this host, 0 first
    host: str  # host of the rendezvous
    port: int  # port of the rendezvous
    # address at which other hosts reach this host's workers; None: that of its connection to the rendezvous
    address: str | None
    token: str = dataclasses.field(repr=False)  # the secret that all hosts share

    def arguments(self) -> list[str]:
        """Returns the options of `tfdist run` for this host, without the token, which is never in a command."""
        rendezvous = f"{bracketed(self.host)}:{self.port}"
        address = [] if self.address is None else ["--address", self.address]
        return ["--node-rank", str(self.rank), "--rendezvous", rendezvous, *address]


def bracketed(address: str) -> str:
    """Returns an address as it is written before a port: IPv6 in brackets."""
    return f"[{address}]" if ":" in address else address
