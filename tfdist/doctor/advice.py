"""How long the exchange of a model's gradient takes on the measured network, and which compression that suggests.

The sizes are those of `Compressor.payload_bytes`, which needs TensorFlow; a test compares them. The rules are those of
`docs/compression.md`, "Which one".
"""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

from tfdist.doctor.link import Link
from tfdist.doctor.units import format_count, format_rate, format_seconds

MATRIX_SIDE = 1024
"""PowerSGD's payload depends on the shapes: the model is taken as square matrices of this side."""

_SMALL_MODEL_PARAMETERS = 5_000_000
_SHORT_SECONDS = 0.01
_MANY_WORKERS = 20
_MBIT = 1e6 / 8
_FAST, _GIGABIT, _SLOW = 1500 * _MBIT, 300 * _MBIT, 30 * _MBIT


@dataclasses.dataclass(frozen=True)
class Exchange:
    """One exchange of the gradient.

    Args:
        method: A name for `compression=`, or `"uncompressed"`.
        bytes_sent: By each worker.
        seconds: How long it takes at least: the bytes at the slowest link, and the round trips.
    """

    method: str
    bytes_sent: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Advice:
    """What the network suggests.

    Args:
        parameters: Of the model.
        workers: How many exchange.
        bytes_per_second: Of the slowest link.
        round_trip_seconds: Of the slowest link.
        exchanges: By method, the uncompressed one first.
        suggestion: A name for `compression=`, or None for none.
        reason: Why.
    """

    parameters: int
    workers: int
    bytes_per_second: float
    round_trip_seconds: float
    exchanges: tuple[Exchange, ...]
    suggestion: str | None
    reason: str

    def to_json(self) -> dict[str, Any]:
        """Returns it as a JSON object."""
        return dataclasses.asdict(self)


def payload_bytes(method: str, parameters: int) -> int:
    """Returns the size of the payload of a model's gradient.

    Args:
        method: One of the methods of `advise`.
        parameters: Their number; in matrices of `MATRIX_SIDE`, or one of all of them where they are fewer.

    >>> payload_bytes("uncompressed", 1000), payload_bytes("bf16", 1000), payload_bytes("int8", 1024)
    (4000, 2000, 1040)
    """
    return _PAYLOADS[method](parameters)


def advise(parameters: int, workers: int, links: Iterable[Link]) -> Advice | None:
    """Returns what the links between the workers suggest, or None where no bandwidth was measured.

    Args:
        parameters: Of the model.
        workers: How many there are.
        links: Those between workers.

    >>> fast = Link("worker 0", "worker 1", 1e-4, 0.0, 1e-4, 1.2e9, 1.2e9)
    >>> advise(10_000_000, 2, [fast]).suggestion is None
    True
    """
    measured = [link for link in links if link.bytes_per_second and link.bytes_per_second_back]
    rates = [rate for link in measured for rate in (link.bytes_per_second, link.bytes_per_second_back) if rate]
    if not rates or workers < 2:
        return None
    rate, round_trip = min(rates), max(link.round_trip_seconds for link in measured)
    exchanges = tuple(_exchange(method, parameters, workers, rate, round_trip) for method in _PAYLOADS)
    suggestion, reason = _suggest(parameters, workers, rate, exchanges[0].seconds)
    return Advice(parameters, workers, rate, round_trip, exchanges, suggestion, reason)


def _suggest(parameters: int, workers: int, rate: float, seconds: float) -> tuple[str | None, str]:
    if rate >= _FAST:
        reason = (
            "the network is faster than 1 Gbit/s: do not compress. Where large dense layers wait for the exchange all "
            'the same, try "powersgd:4"'
        )
        return None, reason
    if seconds < _SHORT_SECONDS:
        return None, f"the exchange takes {format_seconds(seconds)} as it is: do not compress"
    if rate >= _GIGABIT:
        if parameters < _SMALL_MODEL_PARAMETERS:
            return "int8", f"at {format_rate(rate)}, for a small model: it costs next to no accuracy"
        return "powersgd:4", f'at {format_rate(rate)}, for large dense layers; "int8" where its accuracy is too low'
    if rate >= _SLOW:
        return "powersgd:4", f'at {format_rate(rate)}; "int4" where its accuracy is too low'
    if workers > _MANY_WORKERS:
        return "powersgd:4", f"at {format_rate(rate)} and {workers} workers, to which top-k would send more"
    reason = f'at {format_rate(rate)}, or "sign", with dense_steps and more steps: the fewest bytes'
    return "topk:0.01", reason


def _exchange(method: str, parameters: int, workers: int, rate: float, round_trip: float) -> Exchange:
    payload = payload_bytes(method, parameters)
    is_gathered = method.startswith("topk") or (workers == 2 and method in ("bf16", "int8"))
    sent = (workers - 1) * payload if is_gathered else math.ceil(2 * (workers - 1) / workers * payload)
    if is_gathered:
        rounds = workers - 1
    elif method in ("bf16", "int8"):
        rounds = workers  # all to all at once, then a ring
    else:
        rounds = 2 * (workers - 1) * (2 if method.startswith("powersgd") else 1)
    return Exchange(method, sent, sent / rate + rounds * round_trip)


def _powersgd_bytes(parameters: int) -> int:
    side = min(MATRIX_SIDE, max(1, math.isqrt(parameters)))
    matrices = parameters / side**2
    return math.ceil(matrices * min(4 * 4 * 2 * side, 4 * side**2))


_PAYLOADS: dict[str, Callable[[int], int]] = {
    "uncompressed": lambda parameters: 4 * parameters,
    "bf16": lambda parameters: 4 * math.ceil(parameters / 2),
    "int8": lambda parameters: 260 * math.ceil(parameters / 256),
    "powersgd:4": _powersgd_bytes,
    "topk:0.01": lambda parameters: 20 * math.ceil(parameters / 400),
}


def describe(advice: Advice) -> str:
    """Returns what the figures are for, in a line."""
    return (
        f"one exchange of {format_count(advice.parameters)} parameters between {advice.workers} workers at "
        f"{format_rate(advice.bytes_per_second)}, {format_seconds(advice.round_trip_seconds)} a round trip"
    )
