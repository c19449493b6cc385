"""Measures the connection between two tasks: round trip, bandwidth in both directions, and difference of the clocks."""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

from tfdist.planning.link_costs import LinkSpeed
from tfdist.transport.blocking_connection import BlockingConnection
from tfdist.transport.transport_errors import ConnectionClosedError
from tfdist.utils.formatting import format_seconds

MAX_TRANSFER_BYTES = 2**28
TRANSFER_SECONDS = 15.0
_ECHOES = 50
_ECHO_SECONDS = 5.0  # for all echoes, on a slow connection
_FIRST_TRANSFER_BYTES = 2**16
_TARGET_SECONDS = 0.4
_MIN_SECONDS = 0.25
_MAX_GROWTH = 16  # a burst that the network buffers must not make the next transfer endless


@dataclasses.dataclass(frozen=True)
class LinkMeasurement:
    """A connection, as the task `first` measured it."""

    first: str  # the task that measured
    second: str  # the other task
    round_trip_seconds: float  # median time from a message to its answer
    clock_offset_seconds: float  # how far the clock of `second` is ahead
    clock_uncertainty_seconds: float  # largest error of the offset: half the shortest round trip
    bytes_per_second: float | None = None  # bandwidth from `first` to `second`; None: not measured
    bytes_per_second_back: float | None = None  # bandwidth from `second` to `first`; None: not measured

    @classmethod
    def from_json(cls, document: object) -> "LinkMeasurement":
        """Reads what another task measured; raises a ValueError for anything else."""
        message = document if isinstance(document, dict) else {}
        names = [field.name for field in dataclasses.fields(cls)]
        if not all(isinstance(message.get(name), str) for name in names[:2]):
            raise ValueError("not a measurement")
        numbers: dict[str, Any] = {name: message.get(name) for name in names[2:]}
        for name, number in numbers.items():
            if not (number is None and name.startswith("bytes")) and not _is_finite(number):
                raise ValueError("not a measurement")
        return cls(message["first"], message["second"], **numbers)

    @property
    def clock_offset_text(self) -> str:
        """How far the clocks differ, without a sign."""
        return f"{format_seconds(abs(self.clock_offset_seconds))} (± {format_seconds(self.clock_uncertainty_seconds)})"


def slowest_link(links: Iterable[LinkMeasurement]) -> LinkSpeed | None:
    """Returns what an exchange over all of these waits for; None if no bandwidth was measured.

    That is the smallest bandwidth of both directions, and half of the longest round trip.
    """
    measured = [link for link in links if link.bytes_per_second and link.bytes_per_second_back]
    rates = [rate for link in measured for rate in (link.bytes_per_second, link.bytes_per_second_back) if rate]
    return LinkSpeed(min(rates), max(link.round_trip_seconds for link in measured) / 2) if rates else None


def measure(
    first: str, second: str, connection: BlockingConnection, clock: Callable[[], float], *, with_bandwidth: bool
) -> LinkMeasurement:
    """Measures the connection to a peer; raises a ConnectionClosedError if that is gone or too slow.

    Measuring the bandwidth takes about a second, and most of the bandwidth.
    """
    round_trips: list[float] = []
    offset, shortest = 0.0, math.inf
    deadline = time.monotonic() + _ECHO_SECONDS
    while len(round_trips) < _ECHOES and (time.monotonic() < deadline or not round_trips):
        sent_at, clock_before = time.monotonic(), clock()  # in this order the trip contains the reading
        answer = connection.request(do="echo", timeout_seconds=TRANSFER_SECONDS)
        round_trips.append(time.monotonic() - sent_at)
        if round_trips[-1] < shortest:
            # As in NTP: the other clock was read in the middle of the trip, with an error of at most half of it.
            shortest, offset = round_trips[-1], _number(answer, "clock") - (clock_before + round_trips[-1] / 2)
    forward = _bandwidth(lambda count: _send(connection, count)) if with_bandwidth else None
    back = _bandwidth(lambda count: _receive(connection, count)) if with_bandwidth else None
    return LinkMeasurement(first, second, statistics.median(round_trips), offset, shortest / 2, forward, back)


def _bandwidth(transfer: Callable[[int], float]) -> float:
    """Runs growing transfers until one is long enough, and returns its bytes per second."""
    count = _FIRST_TRANSFER_BYTES
    while True:
        began = time.monotonic()
        rate = transfer(count)
        seconds = time.monotonic() - began
        if seconds >= _MIN_SECONDS or count == MAX_TRANSFER_BYTES:
            return rate
        growth = min(max(_TARGET_SECONDS / max(seconds, 1e-9), 2.0), _MAX_GROWTH)
        count = min(int(count * growth), MAX_TRANSFER_BYTES)


def _send(connection: BlockingConnection, count: int) -> float:
    connection.send({"do": "receive", "bytes": count})
    connection.send_bytes(count, TRANSFER_SECONDS)
    return _number(connection.receive(TRANSFER_SECONDS), "bytes_per_second")


def _receive(connection: BlockingConnection, count: int) -> float:
    connection.send({"do": "send", "bytes": count})
    return connection.receive_bytes(count, TRANSFER_SECONDS)


def _number(answer: dict[str, Any], name: str) -> float:
    number = answer.get(name)
    if not _is_finite(number):
        raise ConnectionClosedError("malformed answer")
    return float(answer[name])


def _is_finite(number: object) -> bool:
    return isinstance(number, int | float) and not isinstance(number, bool) and math.isfinite(number)
