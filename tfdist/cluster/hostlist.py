"""The two compressed notations of Slurm: lists of hosts, and of numbers of tasks."""

import re
from itertools import product

_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_PIECE = re.compile(r"\[([^\[\]]*)\]|([^\[\],]+)")
_HOST = re.compile(r"(?:\[[^\[\]]*\]|[^\[\],])+")


def expand_hostlist(text: str) -> tuple[str, ...]:
    """Expands a Slurm host list.

    Args:
        text: For example `SLURM_STEP_NODELIST`.

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
    """Expands Slurm's numbers of tasks, one for each node.

    Args:
        text: For example `SLURM_STEP_TASKS_PER_NODE`.

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
                f"The numbers of tasks a node cannot be read. Received: {text!r}. Expected: Slurm's notation, for "
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
        f"The host list cannot be read. Received: {text!r}. Expected: Slurm's notation, for example "
        "'node[01-03,7],gpu1'. Start the script with srun, or describe the cluster in TF_CONFIG."
    )
