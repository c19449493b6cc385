"""Sums and gathers of arrays over all workers, on one set of links.

Each value has one owner, which adds the workers' values in the order of their ranks and sends the sum to all. So sums
have the same bits on every worker, in every run, and however values are grouped into arrays; a worker sends
`2 (N-1)/N` of an array, as in a ring, but in two rounds instead of `2 (N-1)`. A segment is added and sent on as soon as
all workers' values of it are there.
"""

import collections
import contextlib
import dataclasses
import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tfdist.exchange.exchange_calls import HEADER_BYTES, ExchangeCall, shape_text
from tfdist.exchange.exchange_errors import HAS_LEFT, NO_MESSAGE, ClosedExchangeError, GroupFailure
from tfdist.exchange.links import SEGMENT_BYTES, LinkBrokenError, WorkerLink
from tfdist.utils.active_clock import ActiveClock
from tfdist.utils.reused_memory import ReusedMemory
from tfdist.utils.sum_copies import is_short_sum

_ALIGNMENT_BYTES = 64
# Long segments cost less; short ones are added and sent on while the next arrive, which a slow link needs.
_SHORTEST_SEGMENT_BYTES = 2**18
_SEGMENTS_OF_ARRAY = 64
_CLOSE_SECONDS = 1.0
_RESULTS = ReusedMemory()
# A worker that leaves says so on another connection: its last values may arrive after that.
_LOOK_SECONDS = 0.5
Array = NDArray[Any]


def new_result(shape: Sequence[int], dtype: Any) -> Array:
    """Returns an array with any values in memory that TensorFlow takes without a copy, as results of channels are."""
    result: Array = _RESULTS.empty(shape, dtype)
    return result


class Channel:
    """Exchanges arrays, one after another, in the order in which all workers call them.

    Each method raises the `ExchangeError` of the group when a worker is lost, calls another exchange or is late.

    Args:
        rank: The rank of this worker.
        links: The link to each worker, by rank; `None` for this worker, and for workers that do not take part: they
            count as workers that have zeros.
        failure: The failure of the group.
        name: The name of the channel.
    """

    def __init__(self, rank: int, links: Sequence[WorkerLink | None], failure: GroupFailure, name: str = "") -> None:
        self.size, self.name = len(links), name
        self._rank, self._failure = rank, failure
        self._links = {link.peer: link for link in links if link is not None}
        self._ranks = sorted([rank, *self._links])
        self._absent = [other for other in range(self.size) if other not in self._ranks]
        self._number = 0
        self._has_common_order, self._limit_seconds = False, 0.0
        self._is_closed = False
        self._lock = threading.Lock()

    def before_next(self, number: int, limit_seconds: float) -> None:
        """Describes the next exchange.

        Args:
            number: The number of the exchange in an order that several channels share. A worker that waits for it on
                this channel, while another one waits for it on another channel, fails.
            limit_seconds: The time after which the exchange fails; 0: no limit.
        """
        self._number, self._has_common_order, self._limit_seconds = number, True, limit_seconds

    def all_reduce(self, values: Array) -> Array:
        """Returns the sum of all workers' arrays, which have the same shape and dtype; for bools, whether any is true.

        Values of less than 32 bits are added in float32 and rounded once.
        """
        flat, total = _flat(values), _RESULTS.empty(values.shape, values.dtype)
        result = total.reshape(-1)
        if is_short_sum(flat.nbytes, len(self._ranks)):  # to all others at once
            everything = self._gather("all-reduce", values)
            add_in_order([everything[rank] for rank in self._ranks], result)
            return total
        starts = _part_starts(flat.size, len(self._ranks), flat.itemsize)
        parts = {rank: slice(*starts[place : place + 2]) for place, rank in enumerate(self._ranks)}
        with self._call("all-reduce", values) as transfers:
            own_part = _OwnPart(
                self._rank, transfers, flat[parts[self._rank]], result[parts[self._rank]], sends_sums=True
            )
            for peer, transfer in transfers.items():
                transfer.send(flat[parts[peer]])
                own_part.receive_from(peer)
                transfer.receive_into(result[parts[peer]])
        return total

    def reduce_scatter(self, rows: Array) -> Array:
        """Returns the sum of all workers' rows `rank`, where `rows` is `[number of workers, ...]`.

        Raises:
            ValueError: A worker does not take part, so nobody would have its row.
        """
        self._check_rows(rows)
        if self._absent:
            raise ValueError(
                f"Nobody adds the rows of workers that are gone. Received: rows for {self.size} workers, of which "
                f"{self._absent} do not take part. Expected: all workers."
            )
        flat, total = _flat(rows).reshape(self.size, -1), _RESULTS.empty(rows.shape[1:], rows.dtype)
        with self._call("reduce-scatter", rows) as transfers:
            own_part = _OwnPart(self._rank, transfers, flat[self._rank], total.reshape(-1), sends_sums=False)
            for peer, transfer in transfers.items():
                transfer.send(flat[peer])
                own_part.receive_from(peer)
        return total

    def all_gather(self, values: Array) -> Array:
        """Returns all workers' arrays, which have the same shape and dtype, as `[number of workers, ...]`."""
        return self._gather("all-gather", values).reshape(self.size, *values.shape)

    def all_to_all(self, rows: Array) -> Array:
        """Sends row `i` of `rows`, `[number of workers, ...]`, to worker `i`; returns the received rows, by rank."""
        self._check_rows(rows)
        flat, received = _flat(rows).reshape(self.size, -1), _RESULTS.empty(rows.shape, rows.dtype)
        result = received.reshape(self.size, -1)
        with self._call("all-to-all", rows) as transfers:
            for peer, transfer in transfers.items():
                transfer.send(flat[peer])
                transfer.receive_into(result[peer])
            result[self._rank] = flat[self._rank]
            result[self._absent] = 0
        return received

    def broadcast(self, values: Array, root: int | None = None) -> Array:
        """Returns the array of worker `root`, by default the one of the lowest rank.

        The others pass arrays of the same shape and dtype.
        """
        root = self._ranks[0] if root is None else root
        flat, received = _flat(values), _RESULTS.empty(values.shape, values.dtype)
        result = received.reshape(-1)
        with self._call("broadcast", values, root) as transfers:
            for peer, transfer in transfers.items():
                if self._rank == root:
                    transfer.send(flat)
                elif peer == root:
                    transfer.receive_into(result)
            if self._rank == root:
                result[...] = flat
        return received

    def all_gather_bytes(self, data: bytes, limit: int = 2**24) -> list[bytes]:
        """Returns the bytes of all workers, by rank, which may have different lengths, at most `limit`."""
        lengths = self.all_gather(np.array([len(data)], np.int64))[:, 0]
        if lengths.max() > limit:
            raise ValueError(
                f"A worker exchanges too many bytes. Received: {lengths.tolist()} bytes by rank. Expected: at most "
                f"{limit} each."
            )
        padded = np.zeros(int(lengths.max()), np.uint8)
        padded[: len(data)] = np.frombuffer(data, np.uint8)
        rows = self.all_gather(padded)
        return [row[:length].tobytes() for row, length in zip(rows, lengths, strict=True)]

    def close(self) -> None:
        """Closes the links, unless a thread still exchanges: then the kernel does so when the process ends."""
        self._is_closed = True
        if self._lock.acquire(timeout=_CLOSE_SECONDS):
            for link in self._links.values():
                link.close()
            self._lock.release()

    def close_in_fork(self) -> None:
        """Closes, in a forked child, what would keep the connections of this worker open after its end."""
        for link in self._links.values():
            link.close_in_fork()

    def _gather(self, kind: str, values: Array) -> Array:
        flat, gathered = _flat(values), _RESULTS.empty((self.size, values.size), values.dtype)
        with self._call(kind, values) as transfers:
            for peer, transfer in transfers.items():
                transfer.send(flat)
                transfer.receive_into(gathered[peer])
            gathered[self._rank] = flat
            gathered[self._absent] = 0
        return gathered

    @contextlib.contextmanager
    def _call(self, kind: str, values: Array, root: int = 0) -> "Iterator[dict[int, _Transfer]]":
        """Context of an exchange: its body describes the transfers with all peers, and its end runs them."""
        with self._lock:
            call = ExchangeCall(kind, root, self._number, shape_text(values.shape), values.dtype.name)
            if self._is_closed:
                self._failure.check()
                raise ClosedExchangeError(str(call))
            header, segment_bytes = call.encode(), _segment_bytes(values.nbytes)

            def check(peer: int, received: memoryview) -> None:
                if bytes(received) != header:
                    peer_call = ExchangeCall.decode(received)
                    if peer_call is None:
                        self._failure.lost(peer, NO_MESSAGE)
                    else:
                        self._failure.mismatch({self._rank: str(call), peer: str(peer_call)})
                self._failure.check()

            transfers = {
                peer: _Transfer(link, memoryview(header), check, segment_bytes) for peer, link in self._links.items()
            }
            yield transfers
            self._failure.begins(self.name, call)
            self._run(call, list(transfers.values()))
            self._number += 1
            self._failure.ends(self.name)

    def _run(self, call: ExchangeCall, transfers: "list[_Transfer]") -> None:
        failure, limit = self._failure, self._limit_seconds
        clock = ActiveClock(now=time.monotonic(), max_gap_seconds=max(limit / 2, _LOOK_SECONDS))
        failure.check()
        while transfers:
            has_progressed = False
            for transfer in transfers:
                try:
                    has_progressed |= transfer.progress()
                except LinkBrokenError as error:
                    failure.lost_link(transfer.link.peer, str(error))
                    failure.check()
            if not has_progressed and not _can_progress(transfers, failure):
                for peer in sorted(failure.left.intersection(transfer.link.peer for transfer in transfers)):
                    failure.lost(peer, HAS_LEFT)
                if self._has_common_order:
                    failure.stalls(self.name)
                failure.check()
            transfers = [transfer for transfer in transfers if transfer.outgoing or transfer.incoming]
            if transfers and limit and clock.advance(time.monotonic()) > limit:
                late = [transfer for transfer in transfers if not transfer.has_begun] or transfers
                failure.late([transfer.link.peer for transfer in late], limit, str(call))
                failure.check()

    def _check_rows(self, rows: Array) -> None:
        if rows.ndim == 0 or rows.shape[0] != self.size:
            raise ValueError(
                f"An exchange of rows needs one row for each worker. Received: an array of shape {rows.shape}, and "
                f"{self.size} workers. Expected: the number of workers as the first dimension."
            )


@dataclasses.dataclass
class _Incoming:
    nbytes: int
    into: memoryview | None
    arrived: Callable[[memoryview], None] | None = None  # takes memory of the link, and releases it later


class _Transfer:
    """The segments to send to one worker, and those to receive from it."""

    def __init__(
        self, link: WorkerLink, header: memoryview, check: Callable[[int, memoryview], None], segment_bytes: int
    ) -> None:
        self.link, self.segment_bytes = link, segment_bytes
        self.is_held = False  # what was received last is not added yet
        self.has_begun = False  # the other worker has called this exchange
        self.outgoing = collections.deque([header])
        self.incoming = collections.deque([_Incoming(HEADER_BYTES, None, self._arrived_header)])
        self._check = check

    def send(self, values: Array) -> None:
        """Sends the array, segment by segment, after what was to be sent before."""
        self.outgoing.extend(self._segments(values))

    def receive_into(self, values: Array) -> None:
        """Receives as many values into the array, after what was to be received before."""
        self.incoming.extend(_Incoming(len(segment), segment) for segment in self._segments(values))

    def progress(self) -> bool:
        """Sends and receives at most one segment; returns whether that was possible."""
        has_progressed = False
        if self.outgoing and self.link.send(self.outgoing[0]):
            self.outgoing.popleft()
            has_progressed = True
        if self.incoming and not self.is_held:
            expected = self.incoming[0]
            received = self.link.receive(expected.nbytes, expected.into)
            if received is not None:
                self.incoming.popleft()
                has_progressed = True
                if expected.arrived is None:
                    self.link.release()
                else:
                    expected.arrived(received)
        return has_progressed

    def interests(self) -> list[tuple[int, int]]:
        """Returns what to poll for until `progress` is possible."""
        receives = bool(self.incoming) and not self.is_held
        return self.link.interests(sends=bool(self.outgoing), receives=receives)

    def _segments(self, values: Array) -> Iterator[memoryview]:
        data = values.reshape(-1).view(np.uint8).data
        return (data[start : start + self.segment_bytes] for start in range(0, len(data), self.segment_bytes))

    def _arrived_header(self, header: memoryview) -> None:
        self._check(self.link.peer, header)
        self.link.release()
        self.has_begun = True


class _OwnPart:
    """The part of an array that this worker adds up, segment by segment."""

    def __init__(
        self, rank: int, transfers: dict[int, _Transfer], part: Array, total: Array, *, sends_sums: bool
    ) -> None:
        self._rank, self._transfers = rank, transfers
        self._own, self._total, self._sends_sums = part, total, sends_sums
        self._step = next((transfer.segment_bytes for transfer in transfers.values()), SEGMENT_BYTES) // part.itemsize
        self._arrived: dict[int, dict[int, memoryview]] = collections.defaultdict(dict)
        if not transfers:
            total[...] = part

    def receive_from(self, peer: int) -> None:
        """Receives the values of `peer` for this part."""
        for start in range(0, self._own.size, self._step):
            nbytes = self._own[start : start + self._step].nbytes
            self._transfers[peer].incoming.append(_Incoming(nbytes, None, self._taker(peer, start)))

    def _taker(self, peer: int, start: int) -> Callable[[memoryview], None]:
        def take(received: memoryview) -> None:
            self._transfers[peer].is_held = True
            self._arrived[start][peer] = received
            if len(self._arrived[start]) == len(self._transfers):
                self._add(start, self._arrived.pop(start))

        return take

    def _add(self, start: int, received: dict[int, memoryview]) -> None:
        span = slice(start, start + self._step)
        values = {peer: np.frombuffer(data, self._own.dtype) for peer, data in received.items()}
        values[self._rank] = self._own[span]
        add_in_order([values[rank] for rank in sorted(values)], self._total[span])
        for transfer in self._transfers.values():
            transfer.is_held = False
            transfer.link.release()
            if self._sends_sums:
                transfer.send(self._total[span])


def _can_progress(transfers: list[_Transfer], failure: GroupFailure) -> bool:
    """Waits until a transfer can progress; returns false if none could for a while."""
    poller = select.poll()
    poller.register(failure.descriptor, select.POLLIN)
    for transfer in transfers:
        for descriptor, events in transfer.interests():
            poller.register(descriptor, events)
    can_progress = bool(poller.poll(1000 * _LOOK_SECONDS))
    failure.check()
    return can_progress


@np.errstate(all="ignore")  # infinities and bad numbers reach all workers, and are no warnings, as in TensorFlow
def add_in_order(values: Sequence[Array], total: Array) -> None:
    """Adds up arrays, from first to last, into `total`."""
    if total.dtype == np.bool_:
        np.logical_or.reduce(values, out=total)
    elif total.dtype.itemsize < 4 and total.dtype.kind not in "iu":
        float32_sum = values[0].astype(np.float32)
        for addend in values[1:]:
            float32_sum += addend.astype(np.float32)
        total[...] = float32_sum.astype(total.dtype)
    elif len(values) == 1:
        total[...] = values[0]
    else:
        np.add(values[0], values[1], out=total)
        for addend in values[2:]:
            np.add(total, addend, out=total)


def _segment_bytes(nbytes: int) -> int:
    between = nbytes // _SEGMENTS_OF_ARRAY // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES
    return min(max(between, _SHORTEST_SEGMENT_BYTES), SEGMENT_BYTES)


def _part_starts(size: int, parts: int, itemsize: int) -> list[int]:
    step = max(_ALIGNMENT_BYTES // itemsize, 1)
    return [min(size * part // parts // step * step, size) for part in range(parts)] + [size]


def _flat(values: Array) -> Array:
    return np.ascontiguousarray(values).reshape(-1)
