"""The cluster of a Slurm job step, such as `srun --nodes 2 --ntasks-per-node 4 python train.py`.

Every task of the step becomes a worker of rank `SLURM_PROCID`. The tasks of a node listen on consecutive ports. The
first port is derived from the numbers of the job and the step, so that jobs on the same node rarely collide;
`TFDIST_PORT` sets it. The ranks of a heterogeneous step follow the order of its components.
"""

import os
import re
from collections.abc import Mapping, Sequence
from itertools import accumulate, count, product

from tfdist.cluster.cluster_spec import ClusterConfig, ClusterSpec, Task
from tfdist.utils.argument_checks import integer_variable, optional_integer_variable, required_variable

# Below Linux' ephemeral ports (32768 and up), which outgoing connections may occupy.
_FIRST_PORT = 12_000
_PORTS_PER_STEP = 128
_PORT_BLOCKS = 128
# The jobs of a node are often neighbours, and their steps have small numbers. With 12, the first ten steps of jobs that
# are less than 12 numbers apart have different ports.
_BLOCKS_PER_STEP = 12
_REMEDY = "Start the script with srun, one task per worker, or describe the cluster in TF_CONFIG."
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_PIECE = re.compile(r"\[([^\[\]]*)\]|([^\[\],]+)")
_HOST = re.compile(r"(?:\[[^\[\]]*\]|[^\[\],])+")


def expand_hostlist(text: str) -> tuple[str, ...]:
    """Expands a Slurm host list.

    Args:
        text: The list, for example the value of `SLURM_STEP_NODELIST`.

    Returns:
        The host names in order.

    Raises:
        ValueError: If the text is malformed.

    >>> expand_hostlist("node[01-03,7],gpu1")
    ('node01', 'node02', 'node03', 'node7', 'gpu1')
    >>> expand_hostlist("rack[1-2]n[8-9]-ib")
    ('rack1n8-ib', 'rack1n9-ib', 'rack2n8-ib', 'rack2n9-ib')
    """
    hosts: list[str] = []
    position = 0
    while position < len(text) or position == 0:
        match = _HOST.match(text, position)
        if match is None:
            raise _malformed(text)
        hosts.extend(_expand_host(match[0], text))
        position = match.end()
        if position < len(text) and text[position] != ",":
            raise _malformed(text)
        if position == len(text) - 1:
            raise _malformed(text)
        position += 1
    return tuple(hosts)


def expand_tasks_per_node(text: str) -> tuple[int, ...]:
    """Expands Slurm's list of task counts per node.

    Args:
        text: The list, for example the value of `SLURM_STEP_TASKS_PER_NODE`.

    Raises:
        ValueError: If the text is malformed.

    >>> expand_tasks_per_node("2(x3),1")
    (2, 2, 2, 1)
    """
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part.strip())
        if match is None:
            raise ValueError(
                f"The task counts per node cannot be parsed. Received: {text!r}. Expected: Slurm's notation, for "
                "example '2(x3),1'. Start the script with srun."
            )
        counts.extend([int(match[1])] * int(match[2] or 1))
    return tuple(counts)


def _expand_host(host: str, text: str) -> list[str]:
    pieces = [_expand_ranges(ranges, text) if name == "" else [name] for ranges, name in _PIECE.findall(host)]
    return ["".join(combination) for combination in product(*pieces)]


def _expand_ranges(ranges: str, text: str) -> list[str]:
    names: list[str] = []
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part)
        if match is None or (match[2] and int(match[2]) < int(match[1])):
            raise _malformed(text)
        width = len(match[1])
        names.extend(str(number).zfill(width) for number in range(int(match[1]), int(match[2] or match[1]) + 1))
    return names


def _malformed(text: str) -> ValueError:
    return ValueError(
        f"The host list cannot be parsed. Received: {text!r}. Expected: Slurm's notation, for example "
        "'node[01-03,7],gpu1'. Start the script with srun, or describe the cluster in TF_CONFIG."
    )


def is_slurm_step(environ: Mapping[str, str] | None = None) -> bool:
    """Whether this process is one of several tasks that `srun` started, not a batch script or a shell.

    Only `srun` sets `SLURM_STEP_ID`. A batch script that was submitted within a step has inherited it, with the other
    variables of that step.
    """
    environ = os.environ if environ is None else environ
    if "SLURM_STEP_ID" not in environ or "SLURM_PROCID" not in environ:
        return False
    return _num_tasks(environ) > 1 and not _is_inherited(environ)


def is_outside_allocation(environ: Mapping[str, str], host: str) -> bool:
    """Whether this process is in a shell of `salloc` on a host that Slurm has not allocated, such as a login host."""
    # Slurm's daemon sets SLURMD_NODENAME for all that it starts.
    if "SLURM_JOB_ID" not in environ or "SLURMD_NODENAME" in environ:
        return False
    try:
        allocated = expand_hostlist(environ.get("SLURM_JOB_NODELIST", ""))
    except ValueError:
        return False
    return host.partition(".")[0] not in {node.partition(".")[0] for node in allocated}


def from_slurm(environ: Mapping[str, str] | None = None) -> ClusterConfig:
    """Reads the cluster from the environment of a Slurm job step.

    Reads `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS` or `SLURM_NTASKS`, `SLURM_STEP_NODELIST`,
    `SLURM_STEP_TASKS_PER_NODE` or `SLURM_TASKS_PER_NODE`, `SLURM_DISTRIBUTION`, `SLURM_JOB_ID`, `SLURM_STEP_ID`, and
    `TFDIST_PORT` if it is set; in a heterogeneous job also `SLURM_JOB_NODELIST_HET_GROUP_0` and so on. `SLURM_NODEID`
    and `SLURM_LOCALID` are compared with the result.

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
    rank = integer_variable(environ, "SLURM_PROCID", remedy=_REMEDY)
    nodes = expand_hostlist(required_variable(environ, "SLURM_STEP_NODELIST", remedy=_REMEDY))
    counts = _tasks_per_node(environ, nodes)
    components = _components(environ, nodes)
    # Slurm sorts the list of nodes, but numbers the nodes of a heterogeneous step component by component.
    order = [node for component in components for node in component]
    nodes, counts = tuple(nodes[node] for node in order), tuple(counts[node] for node in order)
    placement = _placement(environ, counts, [len(component) for component in components])
    if not 0 <= rank < len(placement):
        raise ValueError(
            f"This task's number is not in the Slurm step. Received: SLURM_PROCID={rank} with {len(placement)} tasks. "
            f"Expected: 0 to {len(placement) - 1}. {_REMEDY}"
        )
    _check_own_placement(environ, placement[rank])
    base = _port_base(environ)
    addresses = [f"{nodes[node]}:{base + local}" for node, local in placement]
    return ClusterConfig(ClusterSpec({"worker": addresses}), Task("worker", rank), source="Slurm")


def _num_tasks(environ: Mapping[str, str]) -> int:
    # In an interactive step SLURM_NTASKS is the number of the allocation; that of the step is 1.
    name = "SLURM_STEP_NUM_TASKS" if environ.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    return integer_variable(environ, name, remedy=_REMEDY)


def _tasks_per_node(environ: Mapping[str, str], nodes: tuple[str, ...]) -> tuple[int, ...]:
    name = "SLURM_STEP_TASKS_PER_NODE" if environ.get("SLURM_STEP_TASKS_PER_NODE") else "SLURM_TASKS_PER_NODE"
    text = required_variable(environ, name, remedy=_REMEDY)
    counts = expand_tasks_per_node(text)
    expected = _num_tasks(environ)
    if len(counts) != len(nodes) or sum(counts) != expected:
        raise ValueError(
            f"The Slurm variables contradict each other. Received: {len(nodes)} nodes ({', '.join(nodes)}), "
            f"{name}={text!r}, {expected} tasks. Expected: as many counts as nodes, and {expected} tasks in all. "
            f"{_REMEDY}"
        )
    return counts


def _is_inherited(environ: Mapping[str, str]) -> bool:
    """Whether the variables of the step are those of another one, within which this job was submitted."""
    if (
        environ.get("SLURM_STEP_NUM_TASKS")
        and environ.get("SLURM_NTASKS")
        and _num_tasks(environ) != integer_variable(environ, "SLURM_NTASKS", remedy=_REMEDY)
    ):
        return True
    try:
        nodes = expand_hostlist(environ["SLURM_STEP_NODELIST"])
        if len(_components(environ, nodes)) > 1:
            return False
        if not set(nodes) <= set(expand_hostlist(environ.get("SLURM_JOB_NODELIST") or environ["SLURM_STEP_NODELIST"])):
            return True
        # The ids of all tasks of this node; in a batch script only 0.
        ids = environ["SLURM_GTIDS"].split(",")
        return len(ids) != _tasks_per_node(environ, nodes)[int(environ["SLURM_NODEID"])]
    except (KeyError, ValueError, IndexError):
        return False  # `from_slurm` says what is missing or wrong


def _components(environ: Mapping[str, str], nodes: tuple[str, ...]) -> list[list[int]]:
    """Returns the indices of the nodes of each component of a step. A step that is not heterogeneous has one."""
    components: list[list[int]] = []
    for number in count():
        names = (f"SLURM_JOB_NODELIST_{word}_GROUP_{number}" for word in ("HET", "PACK"))
        group = next((environ[name] for name in names if environ.get(name)), None)
        if group is None:
            break
        members = set(expand_hostlist(group))
        components.append([index for index, node in enumerate(nodes) if node in members])
    nonempty_components = [component for component in components if component]
    if sorted(index for component in nonempty_components for index in component) != list(range(len(nodes))):
        return [list(range(len(nodes)))]
    return nonempty_components


def _placement(environ: Mapping[str, str], counts: tuple[int, ...], components: Sequence[int]) -> list[tuple[int, int]]:
    """Returns the index of the node, and the index on that node, of each rank. Nodes of a component are consecutive."""
    distribution = environ.get("SLURM_DISTRIBUTION", "block")
    kind = distribution.replace(",", ":").split(":")[0].strip() or "block"
    placement: list[tuple[int, int]] = []
    for size, end in zip(components, accumulate(components), strict=True):
        tasks = [(node, local) for node in range(end - size, end) for local in range(counts[node])]
        placement += sorted(tasks, key=lambda task: (task[1], task[0])) if kind == "cyclic" else tasks
    if kind in ("block", "*", "cyclic"):
        return placement
    raise ValueError(
        f"The task distribution of the Slurm step is not supported. Received: "
        f"SLURM_DISTRIBUTION={distribution!r}. Expected: block or cyclic. Start it with srun --distribution=block, or "
        "describe the cluster in TF_CONFIG."
    )


def _check_own_placement(environ: Mapping[str, str], placement: tuple[int, int]) -> None:
    names = ("SLURM_NODEID", "SLURM_LOCALID")
    received = tuple(optional_integer_variable(environ, name, remedy=_REMEDY) for name in names)
    if None not in received and received != placement:
        raise ValueError(
            "The placement of this task differs from the distribution of the Slurm step. Received: "
            f"SLURM_NODEID={received[0]}, SLURM_LOCALID={received[1]}. Expected: SLURM_NODEID={placement[0]}, "
            f"SLURM_LOCALID={placement[1]} for SLURM_PROCID={environ['SLURM_PROCID']}. Start it with "
            "srun --distribution=block, or describe the cluster in TF_CONFIG."
        )


def _port_base(environ: Mapping[str, str]) -> int:
    remedy = "Set it to a port that is free on every node, or unset it."
    chosen = optional_integer_variable(environ, "TFDIST_PORT", remedy=remedy)
    if chosen is not None:
        return chosen
    job = integer_variable(environ, "SLURM_JOB_ID", remedy="Set TFDIST_PORT to a port that is free on every node.")
    step = integer_variable(environ, "SLURM_STEP_ID", remedy="Set TFDIST_PORT to a port that is free on every node.")
    return _FIRST_PORT + _PORTS_PER_STEP * ((job + _BLOCKS_PER_STEP * step) % _PORT_BLOCKS)
