"""Exchanges that run while backpropagation computes the next gradients.

Source: Li et al. 2020, "PyTorch Distributed: Experiences on accelerating data parallel training", section 3.2.3; the
schedule is that of one server, the link, with jobs in the order of their release.
"""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class BucketCost:
    """What the exchange of a bucket needs, beside nothing else.

    Attributes:
        encode_seconds: The cores, before it is sent.
        copy_seconds: The cores, while it is sent and received.
        link_seconds: The link.
        wait_seconds: Neither: latencies, and what the first message waits for copies.
        decode_seconds: The cores, when it has arrived.
    """

    encode_seconds: float = 0.0
    copy_seconds: float = 0.0
    link_seconds: float = 0.0
    wait_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def core_seconds(self) -> float:
        """How long the cores are busy."""
        return self.encode_seconds + self.copy_seconds + self.decode_seconds


def exchanged_seconds(compute_seconds: float, ready_seconds: Sequence[float], buckets: Sequence[BucketCost]) -> float:
    """Returns when computation and exchanges have ended.

    What an exchange needs of the cores delays the computation that follows. On the link buckets follow one another,
    beside the computation; latencies of one bucket pass while the next one is sent.

    >>> exchanged_seconds(3.0, [1.0, 3.0], [BucketCost(link_seconds=1.0)] * 2)
    4.0
    >>> exchanged_seconds(3.0, [1.0, 3.0], [BucketCost(encode_seconds=0.25, link_seconds=1.0)] * 2)
    4.5
    >>> exchanged_seconds(3.0, [1.0, 2.0], [BucketCost(link_seconds=5.0, decode_seconds=0.5)] * 2)
    11.5
    >>> exchanged_seconds(3.0, [1.0, 2.0], [BucketCost(copy_seconds=5.0)] * 2)  # the core is busy all the time
    13.0

    Args:
        compute_seconds: The computation of a step up to the last gradient.
        ready_seconds: When each bucket's gradients are computed, without exchanges, increasing.
        buckets: Their costs.
    """
    delay, link_free = 0.0, 0.0
    arrivals = []
    for ready, bucket in zip(ready_seconds, buckets, strict=True):
        delay += bucket.encode_seconds
        link_free = max(link_free, ready + delay) + bucket.link_seconds
        arrivals.append(link_free + bucket.wait_seconds)
        delay += bucket.copy_seconds
    end = compute_seconds + delay
    for arrival, bucket in sorted(zip(arrivals, buckets, strict=True), key=lambda pair: pair[0]):
        end = max(end, arrival) + bucket.decode_seconds
    return end
