"""What the connection between two tasks is like: round trip, bandwidth both ways, and how their clocks differ."""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

from tfdist.doctor.channel import Channel, ChannelError
from tfdist.doctor.service import MAX_TRANSFER_BYTES, TRANSFER_SECONDS

_ECHOES = 50
_ECHO_SECONDS = 5.0  # for all of them, where one takes long
_FIRST_BYTES = 2**16
_TARGET_SECONDS = 0.4
_ENOUGH_SECONDS = 0.25
_LONGEST_STEP = 16  # so that a burst that the network took at once does not make the next transfer endless


@dataclasses.dataclass(frozen=True)
class Link:
    """A connection as the task `first` has measured it.

    Args:
        first: The task that has measured.
        second: The other one.
        round_trip_seconds: Median time from a message to its answer.
        clock_offset_seconds: How far the clock of `second` is ahead.
        clock_uncertainty_seconds: How far that may be wrong: half the shortest round trip.
        bytes_per_second: From `first` to `second`, or None where only the time was measured.
        bytes_per_second_back: From `second` to `first`, or None.
    """

    first: str
    second: str
    round_trip_seconds: float
    clock_offset_seconds: float
    clock_uncertainty_seconds: float
    bytes_per_second: float | None = None
    bytes_per_second_back: float | None = None

    @classmethod
    def from_json(cls, document: object) -> "Link":
        """Reads what another task has measured.

        Raises:
            ValueError: If it is no link.
        """
        said = document if isinstance(document, dict) else {}
        names = [field.name for field in dataclasses.fields(cls)]
        if not all(isinstance(said.get(name), str) for name in names[:2]):
            raise ValueError("no link")
        numbers: dict[str, Any] = {name: said.get(name) for name in names[2:]}
        for name, number in numbers.items():
            if number is None and name.startswith("bytes"):
                continue
            if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
                raise ValueError("no link")
        return cls(said["first"], said["second"], **numbers)

    def to_json(self) -> dict[str, Any]:
        """Returns it as a JSON object."""
        return dataclasses.asdict(self)


def measure(first: str, second: str, channel: Channel, clock: Callable[[], float], *, with_bandwidth: bool) -> Link:
    """Measures the connection to a peer.

    Args:
        first: This task.
        second: The peer.
        channel: The connection to its service.
        clock: Tells the time of this machine, in seconds since 1970.
        with_bandwidth: Whether to measure that, too; takes about a second and nearly all that the connection carries.

    Raises:
        ChannelError: If the peer is gone or too slow.
    """
    trips: list[float] = []
    offset, shortest = 0.0, math.inf
    end = time.monotonic() + _ECHO_SECONDS
    while len(trips) < _ECHOES and (time.monotonic() < end or not trips):
        began, before = clock(), time.monotonic()
        answer = channel.ask(do="echo", limit_seconds=TRANSFER_SECONDS)
        trips.append(time.monotonic() - before)
        if trips[-1] < shortest:
            # As in NTP: the other clock was read in the middle of the trip, wrong by half of it at most.
            shortest, offset = trips[-1], _number(answer, "clock") - (began + trips[-1] / 2)
    forward = _bandwidth(lambda count: _give(channel, count)) if with_bandwidth else None
    back = _bandwidth(lambda count: _fetch(channel, count)) if with_bandwidth else None
    return Link(first, second, statistics.median(trips), offset, shortest / 2, forward, back)


def _bandwidth(transfer: Callable[[int], float]) -> float:
    """Makes transfers that grow until one takes long enough, and returns the bytes a second of the last."""
    count = _FIRST_BYTES
    while True:
        began = time.monotonic()
        rate = transfer(count)
        seconds = time.monotonic() - began
        if seconds >= _ENOUGH_SECONDS or count == MAX_TRANSFER_BYTES:
            return rate
        growth = min(max(_TARGET_SECONDS / max(seconds, 1e-9), 2.0), _LONGEST_STEP)
        count = min(int(count * growth), MAX_TRANSFER_BYTES)


def _give(channel: Channel, count: int) -> float:
    channel.send({"do": "take", "bytes": count})
    channel.send_bytes(count, TRANSFER_SECONDS)
    return _number(channel.receive(TRANSFER_SECONDS), "bytes_per_second")


def _fetch(channel: Channel, count: int) -> float:
    channel.send({"do": "send", "bytes": count})
    return channel.receive_bytes(count, TRANSFER_SECONDS)


def _number(answer: dict[str, Any], name: str) -> float:
    number = answer.get(name)
    if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
        raise ChannelError("it says what is no answer")
    return float(number)
