"""The gradient exchange of a step in a group of any size, beside the computation of the next gradients.

It follows from exchanges that were traced in groups of a few sizes. Source of the schedule: Li et al. 2020, "PyTorch
Distributed: Experiences on accelerating data parallel training", section 3.2.3; it is that of one server, the link,
with jobs in the order of their release.
"""

import dataclasses
from collections.abc import Iterable, Sequence

from tfdist.planning.link_costs import LinkSpeed, TransferCosts, interpolate, messages, sent_bytes
from tfdist.planning.measurements import DENSE, EXCHANGE, GATHER, Collective, ExchangeMeasurement, ProgramMeasurement

SEGMENT_BYTES = 2**19  # of the exchange, which sends and adds segments beside each other; a test compares it
_ONE_PHASE = ("randomk", "powersgd", "topk", DENSE)  # the other methods have two phases if there are more members


@dataclasses.dataclass(frozen=True)
class BucketCost:
    """What the exchange of a bucket needs, beside nothing else."""

    encode_seconds: float = 0.0  # the cores, before it is sent
    copy_seconds: float = 0.0  # the cores, while it is sent and received
    link_seconds: float = 0.0
    wait_seconds: float = 0.0  # neither: latencies, and what the first message waits for copies
    decode_seconds: float = 0.0  # the cores, when it has arrived

    @property
    def core_seconds(self) -> float:
        return self.encode_seconds + self.copy_seconds + self.decode_seconds


def exchange_of(program: ProgramMeasurement, method: str, members: int) -> ExchangeMeasurement:
    """Returns the exchange of a method in a group of any size.

    Payloads that are summed or exchanged in slices do not depend on the size of the group; the second phase gathers a
    slice of `1 / N`; so the time to encode and decode stays, too. Where all members gather all payloads, it is linear.
    """
    by_members = {exchange.members: exchange for exchange in program.exchanges if exchange.method == method}
    if not by_members:
        raise KeyError(method)
    if members in by_members:
        return by_members[members]
    measured = [by_members[count] for count in sorted(by_members)]
    nearest = min(measured, key=lambda exchange: (abs(exchange.members - members), exchange.members))
    if members > 2 and nearest.members == 2:
        nearest = measured[-1]  # with two members some methods have one phase, with more they have two
    seconds = nearest.compute_seconds
    if _gathers_all(nearest):
        seconds = interpolate([(exchange.members, exchange.compute_seconds) for exchange in measured], members)
        seconds = max(seconds, min(exchange.compute_seconds for exchange in measured))
    collectives = tuple(_scaled(nearest, members))
    return dataclasses.replace(nearest, members=members, compute_seconds=seconds, collectives=collectives)


def wire_bytes(collectives: Iterable[Collective], members: int) -> float:
    """Returns what each member sends in all of the collectives.

    >>> wire_bytes([Collective("sum", 12, 0), Collective("gather", 2, 0)], 4)
    42.0
    """
    return sum((sent_bytes(collective.kind, collective.nbytes, members) for collective in collectives), 0.0)


def bucket_costs(
    exchange: ExchangeMeasurement, dense: ExchangeMeasurement, link: LinkSpeed, transfers: TransferCosts, cores: int
) -> list[BucketCost]:
    """Returns the cost of each bucket in turn.

    Half of the computation of a method counts as encoding and half as decoding; each bucket takes a part of it in
    proportion to its gradients. Copies run beside the link, except those of the first segment for each owner. `dense`
    is the uncompressed exchange of as many members, which says how large the gradients of a bucket are.
    """
    members = exchange.members
    sizes = bucket_bytes(dense)
    buckets = by_bucket(exchange.collectives)
    if len(sizes) != len(buckets):
        sizes = [wire_bytes(bucket, members) for bucket in buckets]
    total = sum(sizes) or 1.0
    costs = []
    for bucket, size in zip(buckets, sizes, strict=True):
        compute = exchange.compute_seconds * size / total / cores
        copies = sum(transfers.core_seconds(collective.kind, collective.nbytes, members) for collective in bucket)
        on_link = sum(
            sent_bytes(collective.kind, collective.nbytes, members) / link.bytes_per_second for collective in bucket
        )
        waits = sum(wait_seconds(collective, members, link, transfers) for collective in bucket)
        costs.append(BucketCost(compute / 2, copies / cores, on_link, waits, compute / 2))
    return costs


def bucket_bytes(exchange: ExchangeMeasurement) -> list[float]:
    """Returns the bytes of the gradients of each bucket of an uncompressed exchange."""
    return [float(sum(collective.nbytes for collective in bucket)) for bucket in by_bucket(exchange.collectives)]


def by_bucket(collectives: Iterable[Collective]) -> list[list[Collective]]:
    """Returns the collectives of each bucket, in the order of the buckets."""
    buckets: dict[int, list[Collective]] = {}
    for collective in collectives:
        buckets.setdefault(collective.bucket, []).append(collective)
    return [buckets[number] for number in sorted(buckets)]


def ready_parts(program: ProgramMeasurement, buckets: int) -> list[float]:
    """Returns the part of backpropagation after which each bucket is ready, for any number of buckets."""
    known = program.bucket_ready
    if len(known) == buckets:
        return list(known)
    points = [(float(index), ready) for index, ready in enumerate(known)]
    if buckets == 1 or len(points) == 1:
        return [known[-1]] * buckets
    return [interpolate(points, index * (len(known) - 1) / (buckets - 1)) for index in range(buckets)]


def wait_seconds(collective: Collective, members: int, link: LinkSpeed, transfers: TransferCosts) -> float:
    """Returns how long an exchange takes beside the time in which it occupies the link: latencies and one segment."""
    rounds = messages(collective.kind, collective.nbytes, members)
    segment = min(collective.nbytes, SEGMENT_BYTES * members)
    return rounds * link.latency_seconds + transfers.seconds(collective.kind, segment, members)


def _gathers_all(exchange: ExchangeMeasurement) -> bool:
    kinds = {collective.kind for collective in exchange.collectives}
    return exchange.members > 2 and GATHER in kinds and EXCHANGE not in kinds


def _scaled(exchange: ExchangeMeasurement, members: int) -> Iterable[Collective]:
    name = exchange.method.partition(":")[0]
    for bucket in by_bucket(exchange.collectives):
        is_two_phase = any(collective.kind == EXCHANGE for collective in bucket)
        for collective in bucket:
            if collective.kind == GATHER and is_two_phase:
                yield dataclasses.replace(collective, nbytes=round(collective.nbytes * exchange.members / members))
            elif collective.kind == GATHER and exchange.members == 2 and members > 2 and name not in _ONE_PHASE:
                yield dataclasses.replace(collective, kind=EXCHANGE)
                yield dataclasses.replace(collective, nbytes=round(collective.nbytes / members))
            else:
                yield collective


def exchanged_seconds(compute_seconds: float, ready_seconds: Sequence[float], buckets: Sequence[BucketCost]) -> float:
    """Returns when computation and exchanges have ended.

    `ready_seconds` say when each bucket's gradients are computed, without exchanges, increasing.

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
