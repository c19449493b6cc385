"""Estimates the time of a gradient exchange on the measured network, and suggests a compression method.

The payload sizes are those of `Compressor.payload_bytes`, which needs TensorFlow; a test compares them. The rules are
those of `docs/compression.md`, "Which one".
"""

import dataclasses
import math
from collections.abc import Callable, Iterable

from tfdist.doctor.link_measurement import LinkMeasurement, slowest_link
from tfdist.planning.group_exchanges import wire_bytes
from tfdist.planning.link_costs import LinkSpeed, collective_seconds
from tfdist.planning.measurements import EXCHANGE, GATHER, SUM, Collective
from tfdist.utils.formatting import format_rate, format_seconds

MATRIX_SIDE = 1024
"""PowerSGD's payload depends on the shapes: the estimate is for square matrices of this side."""

_SMALL_MODEL_PARAMETERS = 5_000_000
_SHORT_EXCHANGE_SECONDS = 0.01
_MANY_WORKERS = 20
_MBIT = 1e6 / 8
_FAST, _GIGABIT, _SLOW = 1500 * _MBIT, 300 * _MBIT, 30 * _MBIT  # bytes per second


@dataclasses.dataclass(frozen=True)
class ExchangeEstimate:
    """One gradient exchange."""

    method: str  # a name for `compression=`, or `"uncompressed"`
    bytes_sent: int  # bytes that each worker sends
    seconds: float  # lower bound of the time: the bytes and the messages in turn, on the slowest connection


@dataclasses.dataclass(frozen=True)
class Advice:
    """Suggestion for a network."""

    parameters: int  # number of parameters of the model
    workers: int
    bytes_per_second: float  # bandwidth of the slowest connection
    round_trip_seconds: float  # round trip of the slowest connection
    exchanges: tuple[ExchangeEstimate, ...]  # estimates of all methods, `"uncompressed"` first
    suggestion: str | None  # a name for `compression=`; None: no compression
    reason: str  # why


def advise(parameters: int, workers: int, links: Iterable[LinkMeasurement]) -> Advice | None:
    """Returns what the connections between the workers suggest; None if no bandwidth was measured.

    >>> fast = LinkMeasurement("worker 0", "worker 1", 1e-4, 0.0, 1e-4, 1.2e9, 1.2e9)
    >>> advise(10_000_000, 2, [fast]).suggestion is None
    True
    """
    link = slowest_link(links)
    if link is None or workers < 2:
        return None
    exchanges = tuple(_estimate(method, parameters, workers, link) for method in PAYLOAD_BYTES)
    suggestion, reason = _suggest(parameters, workers, link.bytes_per_second, exchanges[0].seconds)
    round_trip_seconds = 2 * link.latency_seconds
    return Advice(parameters, workers, link.bytes_per_second, round_trip_seconds, exchanges, suggestion, reason)


def _suggest(parameters: int, workers: int, rate: float, uncompressed_seconds: float) -> tuple[str | None, str]:
    if rate >= _FAST:
        reason = (
            "the network is faster than 1 Gbit/s: do not compress. If the exchange still limits a model of large dense "
            'layers, try "powersgd:4"'
        )
        return None, reason
    if uncompressed_seconds < _SHORT_EXCHANGE_SECONDS:
        return None, f"the exchange takes {format_seconds(uncompressed_seconds)} without compression: do not compress"
    if rate >= _GIGABIT:
        if parameters < _SMALL_MODEL_PARAMETERS:
            return "int8", f"at {format_rate(rate)}, for a small model: it costs almost no accuracy"
        return "powersgd:4", f'at {format_rate(rate)}, for large dense layers; "int8" if its accuracy is too low'
    if rate >= _SLOW:
        return "powersgd:4", f'at {format_rate(rate)}; "int4" if its accuracy is too low'
    if workers > _MANY_WORKERS:
        return "powersgd:4", f"at {format_rate(rate)} with {workers} workers, where top-k would send more"
    reason = f'at {format_rate(rate)}, or "sign", with dense_steps and more steps: the fewest bytes'
    return "topk:0.01", reason


def _estimate(method: str, parameters: int, workers: int, link: LinkSpeed) -> ExchangeEstimate:
    collectives = _collectives(method, PAYLOAD_BYTES[method](parameters), workers)
    seconds = sum(collective_seconds(collective.kind, collective.nbytes, workers, link) for collective in collectives)
    return ExchangeEstimate(method, math.ceil(wire_bytes(collectives, workers)), seconds)


def _collectives(method: str, payload: int, workers: int) -> list[Collective]:
    if method.startswith("topk") or (workers == 2 and method in ("bf16", "int8")):
        return [Collective(GATHER, payload, 0)]
    if method in ("bf16", "int8"):  # slices to their owners, then the sums of slices to all
        return [Collective(EXCHANGE, payload, 0), Collective(GATHER, round(payload / workers), 0)]
    return [Collective(SUM, payload // 2, 0)] * 2 if method.startswith("powersgd") else [Collective(SUM, payload, 0)]


def _powersgd_bytes(parameters: int) -> int:
    side = min(MATRIX_SIDE, max(1, math.isqrt(parameters)))
    matrices = parameters / side**2
    return math.ceil(matrices * min(4 * 4 * 2 * side, 4 * side**2))


# By method: the payload of the gradients of so many parameters in matrices of side `MATRIX_SIDE`, or in a smaller one.
PAYLOAD_BYTES: dict[str, Callable[[int], int]] = {
    "uncompressed": lambda parameters: 4 * parameters,
    "bf16": lambda parameters: 4 * math.ceil(parameters / 2),
    "int8": lambda parameters: 260 * math.ceil(parameters / 256),
    "powersgd:4": _powersgd_bytes,
    "topk:0.01": lambda parameters: 20 * math.ceil(parameters / 400),
}
