"""Exchanges that run while backpropagation computes the next gradients.

Source: Li et al. 2020, "PyTorch Distributed: Experiences on accelerating data parallel training", section 3.2.3; the
schedule is that of one server with jobs in the order of their release.
"""

from collections.abc import Sequence


def finish_seconds(ready_seconds: Sequence[float], exchange_seconds: Sequence[float]) -> float:
    """Returns when the last bucket has been exchanged, if a link exchanges buckets one after another.

    >>> finish_seconds([1.0, 2.0, 3.0], [0.5, 0.5, 0.5]), finish_seconds([1.0, 2.0, 3.0], [2.0, 2.0, 2.0])
    (3.5, 7.0)

    Args:
        ready_seconds: When the gradients of each bucket are computed, from the start of the step, increasing.
        exchange_seconds: How long each exchange takes alone.
    """
    now = 0.0
    for ready, seconds in zip(ready_seconds, exchange_seconds, strict=True):
        now = max(now, ready) + seconds
    return now


def shared_core_seconds(
    compute_seconds: float, ready_seconds: Sequence[float], exchange_seconds: Sequence[float], busy_seconds: Sequence[float]
) -> float:
    """Returns when computation and exchanges have ended if they share the cores.

    What an exchange needs of the cores (encoding, copies to sockets) delays the computation that follows; the rest of
    it, on the link, runs beside.

    >>> shared_core_seconds(3.0, [1.0, 3.0], [1.0, 1.0], [0.0, 0.0])
    4.0
    >>> shared_core_seconds(3.0, [1.0, 3.0], [1.0, 1.0], [0.25, 0.25])
    4.5

    Args:
        compute_seconds: The computation of a step up to the last gradient.
        ready_seconds: When each bucket's gradients are computed, without exchanges, increasing.
        exchange_seconds: How long each bucket is on the link.
        busy_seconds: How long each bucket occupies the cores, before it is sent.
    """
    delay, link_free, end = 0.0, 0.0, 0.0
    for ready, exchange, busy in zip(ready_seconds, exchange_seconds, busy_seconds, strict=True):
        delay += busy
        link_free = max(link_free, ready + delay) + exchange
        end = link_free
    return max(end, compute_seconds + delay)
