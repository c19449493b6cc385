"""Which node runs which processes of an attempt."""

from collections.abc import Sequence

from tfdist.launch.process_roles import Role, run_roles
from tfdist.launch.rendezvous.membership import Node


def place(shares: Sequence[int], *, parameter_servers: int = 0, has_chief: bool = False) -> list[dict[int, Role]]:
    """Returns the processes of each node, by rank.

    The chief runs on the first node. Workers follow the order of the nodes. Each node in turn gets a parameter server,
    the first node first: so the network cards of all nodes carry the variables, and a single server is on the node
    whose loss ends the run anyway.

    Args:
        shares: Number of workers of each node, at least 1.
        parameter_servers: Number of parameter servers of all nodes together.
        has_chief: Whether the workers hold the stages of a chief's model.

    >>> [[role.name for role in roles.values()] for roles in place([1, 2], parameter_servers=3)]
    [['chief', 'worker 0', 'ps 0', 'ps 2'], ['worker 1', 'worker 2', 'ps 1']]
    """
    roles = run_roles(sum(shares), parameter_servers=parameter_servers, has_chief=has_chief)
    nodes = {
        "chief": [0],
        "worker": [node for node, share in enumerate(shares) for _ in range(share)],
        "ps": [index % len(shares) for index in range(parameter_servers)],
    }
    found: list[dict[int, Role]] = [{} for _ in shares]
    for rank, role in roles.items():
        found[nodes[role.task.type][role.task.index]][rank] = role
    return found


def workers_left_out(nodes: Sequence[Node], failed_rank: int | None, count: int) -> dict[int, int]:
    """Returns how many workers each node leaves out: first the node of the failed worker, then the last nodes.

    Args:
        nodes: The present nodes, with the roles that they had in the attempt.
        failed_rank: Rank of the worker that failed, or None.
        count: Number of workers to leave out.
    """
    failed = [node for node in nodes if failed_rank in node.roles]
    left_out: dict[int, int] = {}
    for node in [*failed, *reversed(nodes)]:
        taken = min(count, node.workers - left_out.get(node.rank, 0))
        if taken > 0:
            left_out[node.rank] = left_out.get(node.rank, 0) + taken
            count -= taken
    return left_out
