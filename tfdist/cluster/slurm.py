"""The environment of a Slurm job step: `srun --nodes 2 --ntasks-per-node 4 python train.py`.

Every task of the step becomes a worker, ranked by `SLURM_PROCID`. Tasks on one node listen on consecutive ports, from a
base that is derived from the job and the step, so that jobs that share a node rarely meet; `TFDIST_PORT` sets the base.
"""

import os
from collections.abc import Mapping

from tfdist.cluster.environment import integer, optional_integer, required
from tfdist.cluster.hostlist import expand_hostlist, expand_tasks_per_node
from tfdist.cluster.spec import ClusterConfig, ClusterSpec, Task

# Below the ports that Linux hands out by itself (32768 and up), where an outgoing connection might sit already.
_FIRST_PORT = 12_000
_PORTS_PER_STEP = 128
_PORT_BLOCKS = 128


def is_slurm_step(environ: Mapping[str, str] | None = None) -> bool:
    """Whether this process is one of several tasks that `srun` started.

    A batch script, or a shell in an allocation, is not: only `srun` sets `SLURM_STEP_ID`.
    """
    environ = os.environ if environ is None else environ
    if "SLURM_STEP_ID" not in environ or "SLURM_PROCID" not in environ:
        return False
    return _num_tasks(environ) > 1


def from_slurm(environ: Mapping[str, str] | None = None) -> ClusterConfig:
    """Reads the cluster from the environment of a Slurm job step.

    Reads `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS` or `SLURM_NTASKS`, `SLURM_STEP_NODELIST`,
    `SLURM_STEP_TASKS_PER_NODE` or `SLURM_TASKS_PER_NODE`, `SLURM_DISTRIBUTION`, `SLURM_JOB_ID`, `SLURM_STEP_ID`, and
    `TFDIST_PORT` if it is set. `SLURM_NODEID` and `SLURM_LOCALID` are compared with the result.

    Args:
        environ: The environment. Defaults to `os.environ`.

    Raises:
        ValueError: If a variable is missing or contradicts another.

    >>> config = from_slurm({
    ...     "SLURM_PROCID": "2", "SLURM_NTASKS": "3", "SLURM_STEP_NODELIST": "node[01-02]",
    ...     "SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_JOB_ID": "1280", "SLURM_STEP_ID": "0"})
    >>> config.cluster.jobs["worker"]
    ('node01:12000', 'node01:12001', 'node02:12000')
    >>> config.rank
    2
    """
    environ = os.environ if environ is None else environ
    rank = integer(environ, "SLURM_PROCID", remedy=_REMEDY)
    nodes = expand_hostlist(required(environ, "SLURM_STEP_NODELIST", remedy=_REMEDY))
    counts = _tasks_per_node(environ, nodes)
    placement = _placement(environ, counts)
    if not 0 <= rank < len(placement):
        raise ValueError(
            f"This task's number is not in the Slurm step. Received: SLURM_PROCID={rank} with {len(placement)} tasks. "
            f"Expected: 0 to {len(placement) - 1}. {_REMEDY}"
        )
    _check_own_place(environ, placement[rank])
    base = _port_base(environ)
    addresses = [f"{nodes[node]}:{base + local}" for node, local in placement]
    return ClusterConfig(ClusterSpec({"worker": addresses}), Task("worker", rank), source="Slurm")


_REMEDY = "Start the script with srun, one task a worker, or describe the cluster in TF_CONFIG."


def _num_tasks(environ: Mapping[str, str]) -> int:
    # In an interactive step SLURM_NTASKS is the allocation's number; the step's own is 1.
    name = "SLURM_STEP_NUM_TASKS" if environ.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    return integer(environ, name, remedy=_REMEDY)


def _tasks_per_node(environ: Mapping[str, str], nodes: tuple[str, ...]) -> tuple[int, ...]:
    name = "SLURM_STEP_TASKS_PER_NODE" if environ.get("SLURM_STEP_TASKS_PER_NODE") else "SLURM_TASKS_PER_NODE"
    text = required(environ, name, remedy=_REMEDY)
    counts = expand_tasks_per_node(text)
    expected = _num_tasks(environ)
    if len(counts) != len(nodes) or sum(counts) != expected:
        raise ValueError(
            f"The Slurm variables contradict each other. Received: {len(nodes)} nodes ({', '.join(nodes)}), "
            f"{name}={text!r}, {expected} tasks. Expected: as many counts as nodes, and {expected} tasks in all. "
            f"{_REMEDY}"
        )
    return counts


def _placement(environ: Mapping[str, str], counts: tuple[int, ...]) -> list[tuple[int, int]]:
    """Returns the node's position and the position on that node of each rank."""
    distribution = environ.get("SLURM_DISTRIBUTION", "block")
    kind = distribution.replace(",", ":").split(":")[0].strip() or "block"
    places = [(node, local) for node, count in enumerate(counts) for local in range(count)]
    if kind in ("block", "*"):
        return places
    if kind == "cyclic":
        return sorted(places, key=lambda place: (place[1], place[0]))
    raise ValueError(
        f"The Slurm step distributes its tasks in a way that is not supported. Received: "
        f"SLURM_DISTRIBUTION={distribution!r}. Expected: block or cyclic. Start it with srun --distribution=block, or "
        "describe the cluster in TF_CONFIG."
    )


def _check_own_place(environ: Mapping[str, str], place: tuple[int, int]) -> None:
    told = tuple(optional_integer(environ, name, remedy=_REMEDY) for name in ("SLURM_NODEID", "SLURM_LOCALID"))
    if None not in told and told != place:
        raise ValueError(
            f"The Slurm step placed this task elsewhere than its distribution says. Received: SLURM_NODEID={told[0]}, "
            f"SLURM_LOCALID={told[1]}. Expected: SLURM_NODEID={place[0]}, SLURM_LOCALID={place[1]} for "
            f"SLURM_PROCID={environ['SLURM_PROCID']}. Start it with srun --distribution=block, or describe the cluster "
            "in TF_CONFIG."
        )


def _port_base(environ: Mapping[str, str]) -> int:
    chosen = optional_integer(environ, "TFDIST_PORT", remedy="Set it to a port free on every node, or unset it.")
    if chosen is not None:
        return chosen
    job = integer(environ, "SLURM_JOB_ID", remedy="Set TFDIST_PORT to a port that is free on every node.")
    step = integer(environ, "SLURM_STEP_ID", remedy="Set TFDIST_PORT to a port that is free on every node.")
    return _FIRST_PORT + _PORTS_PER_STEP * ((job + step) % _PORT_BLOCKS)
