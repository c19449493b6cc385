"""The gradient exchange of a step in a group of any size, from exchanges that were traced in groups of a few sizes."""

import dataclasses
from collections.abc import Iterable

from tfdist.planning.link_costs import Link, messages, occupied_seconds, sent_bytes
from tfdist.planning.measurements import (
    DENSE,
    EXCHANGE,
    GATHER,
    SUM,
    Collective,
    ExchangeMeasurement,
    ProgramMeasurement,
)
from tfdist.planning.overlap import BucketCost
from tfdist.planning.transfer_costs import SHORT_BYTES, TransferCosts, interpolate

# Those of `collectives/all_reduce_algorithms.py`; a test compares them.
PIECE_BYTES = 2 * 2**20  # larger tensors are sent in pieces, beside each other
_ONE_PHASE = ("randomk", "powersgd", "topk", DENSE)  # the other methods have two phases if there are more members


def exchange_of(program: ProgramMeasurement, method: str, members: int) -> ExchangeMeasurement:
    """Returns the exchange of a method in a group of any size.

    Payloads that are summed or exchanged in slices do not depend on the size of the group; the second phase gathers a
    slice of `1 / N`; so the time to encode and decode stays, too. Where all members gather all payloads, it is linear.

    Raises:
        KeyError: The method was not measured.
    """
    measured = sorted((one for one in program.exchanges if one.method == method), key=lambda one: one.members)
    if not measured:
        raise KeyError(method)
    equal = [one for one in measured if one.members == members]
    if equal:
        return equal[0]
    nearest = min(measured, key=lambda one: (abs(one.members - members), one.members))
    if members > 2 and nearest.members == 2:
        nearest = measured[-1]
    seconds = nearest.compute_seconds
    if _gathers_all(nearest):
        seconds = interpolate([(one.members, one.compute_seconds) for one in measured], members)
        seconds = max(seconds, min(one.compute_seconds for one in measured))
    collectives = tuple(_scaled(nearest, members))
    return dataclasses.replace(nearest, members=members, compute_seconds=seconds, collectives=collectives)


def wire_bytes(collectives: Iterable[Collective], members: int) -> float:
    """Returns what each member sends in all of the collectives.

    >>> wire_bytes([Collective("sum", 12, 0), Collective("gather", 2, 0)], 4)
    24.0
    """
    return sum((sent_bytes(one.kind, one.nbytes, members) for one in collectives), 0.0)


def bucket_costs(
    exchange: ExchangeMeasurement, dense: ExchangeMeasurement, link: Link, transfers: TransferCosts, cores: int
) -> list[BucketCost]:
    """Returns the cost of each bucket in turn.

    Half of the computation of a method counts as encoding and half as decoding; of all buckets each has a part in
    proportion to its gradients. Copies run beside the link, except those of the first piece of each tensor.

    Args:
        exchange: The exchange.
        dense: The uncompressed one of as many members, which says how large the gradients of a bucket are.
        link: The connection of each member.
        transfers: What collectives cost the cores.
        cores: Cores of a member, which share the work.
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
        copies = sum(_copy_seconds(one, members, transfers) for one in bucket)
        sent = sum(occupied_seconds(one.kind, one.nbytes, members, link) for one in bucket)
        waits = sum(wait_seconds(one, members, link, transfers) for one in bucket)
        costs.append(BucketCost(compute / 2, copies / cores, sent, waits, compute / 2))
    return costs


def bucket_bytes(exchange: ExchangeMeasurement) -> list[float]:
    """Returns the bytes of the gradients of each bucket of an uncompressed exchange."""
    return [float(sum(one.nbytes for one in bucket)) for bucket in by_bucket(exchange.collectives)]


def by_bucket(collectives: Iterable[Collective]) -> list[list[Collective]]:
    """Returns the collectives of each bucket, in the order of the buckets."""
    buckets: dict[int, list[Collective]] = {}
    for one in collectives:
        buckets.setdefault(one.bucket, []).append(one)
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


def pieces(one: Collective, members: int) -> tuple[str, int, float]:
    """Returns how a tensor is sent: the kind of collective, the number of pieces, and the bytes of each.

    >>> pieces(Collective("sum", 2**23, 0), 2), pieces(Collective("sum", 1000, 0), 2)
    (('sum', 4, 2097152.0), ('gather', 1, 1000.0))
    """
    if one.kind == SUM and members == 2 and one.nbytes <= SHORT_BYTES:
        return GATHER, 1, float(one.nbytes)
    count = max(-(-one.nbytes // PIECE_BYTES), 1)
    return one.kind, count, one.nbytes / count


def _copy_seconds(one: Collective, members: int, transfers: TransferCosts) -> float:
    kind, count, nbytes = pieces(one, members)
    return count * transfers.core_seconds(kind, nbytes, members)


def wait_seconds(one: Collective, members: int, link: Link, transfers: TransferCosts) -> float:
    """Returns how long a collective takes beside the time in which it occupies the link: latencies and one piece."""
    kind, _, nbytes = pieces(one, members)
    return messages(kind, members) * link.of(kind).latency_seconds + transfers.seconds(kind, nbytes, members)


def _gathers_all(exchange: ExchangeMeasurement) -> bool:
    kinds = {one.kind for one in exchange.collectives}
    return exchange.members > 2 and GATHER in kinds and EXCHANGE not in kinds


def _scaled(exchange: ExchangeMeasurement, members: int) -> Iterable[Collective]:
    name = exchange.method.partition(":")[0]
    for bucket in by_bucket(exchange.collectives):
        is_two_phase = any(one.kind == EXCHANGE for one in bucket)
        for one in bucket:
            if one.kind == GATHER and is_two_phase:
                yield dataclasses.replace(one, nbytes=round(one.nbytes * exchange.members / members))
            elif one.kind == GATHER and exchange.members == 2 and members > 2 and name not in _ONE_PHASE:
                yield dataclasses.replace(one, kind=EXCHANGE)
                yield dataclasses.replace(one, nbytes=round(one.nbytes / members))
            else:
                yield one
