"""How much of an array a worker sends in a sum of all workers' arrays, for the exchange, its counters and plans."""

SHORT_BYTES = 64 * 2**10


def is_short_sum(nbytes: float, members: int) -> bool:
    """Whether each worker sends all of an array to all others, who add it: one round, where a sum by owners needs two.

    >>> is_short_sum(2**16, 2), is_short_sum(2**16, 3)
    (True, False)
    """
    return nbytes * (members - 1) <= SHORT_BYTES


def sum_copies(nbytes: float, members: int) -> float:
    """Returns how many times an array of `nbytes` is sent by each worker.

    In a sum by owners this is `2 (N - 1) / N`, the least that is possible (Patarasuk and Yuan 2009, "Bandwidth optimal
    all-reduce algorithms for clusters of workstations").

    >>> sum_copies(2**20, 2), sum_copies(2**20, 4), sum_copies(8, 2), sum_copies(8, 4)
    (1.0, 1.5, 1.0, 3.0)
    """
    return float(members - 1) if is_short_sum(nbytes, members) else 2 * (members - 1) / members
