"""The bars: requirements that the measurements are compared with."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from network_run.variants import BY_NAME, JAX, METHODS, TORCH, UNSHAPED, Variant

# Decided by the two digits that are shown.
_DIGITS = 2
_SPEEDUP_OF_POWERSGD = {"1 Gbit/s": 4.0, "100 Mbit/s": 25.0}
_BEST_AGAINST_FLOOR = {"1 Gbit/s": 1.15, "100 Mbit/s": 1.2}
_NOISE = 0.03  # of comparisons with other programs
_STATED_BYTES_OFF = 0.02
# By the peers' framework: name of the bar, and what `where` adds.
_AGAINST_PEERS = {
    TORCH: ("{variant} / PyTorch's nearest", "{peer}"),
    JAX: ("tfdist / Keras on JAX, same model and link", "{variant}"),
}


@dataclass(frozen=True)
class Bar:
    """A figure that must be reached.

    Attributes:
        what: Name, the same wherever the figure is measured.
        where: Workload and link, and the compared variant if `what` does not say it.
        required: The limit.
        measured: The measured value.
        at_least: Whether `required` is a lower limit; otherwise it is an upper limit.
        noise: The fraction of `required` by which it may be missed.
    """

    what: str
    where: str
    required: float
    measured: float
    at_least: bool = False
    noise: float = 0.0

    @property
    def is_reached(self) -> bool:
        """Whether the bar is reached, at the digits that are shown.

        >>> Bar("", "", 1.0, 1.03, noise=0.03).is_reached, Bar("", "", 1.0, 1.03).is_reached
        (True, False)
        """
        measured, limit = round(self.measured, _DIGITS), self.required * (1.0 + self.noise)
        return measured >= self.required / (1.0 + self.noise) if self.at_least else measured <= limit

    @property
    def missed_by(self) -> float:
        """The fraction of `required` by which it is missed; negative if it is reached with a margin.

        >>> round(Bar("", "", 4.0, 3.0, at_least=True).missed_by, 2), round(Bar("", "", 1.0, 0.9).missed_by, 2)
        (0.33, -0.1)
        """
        ratio = self.required / self.measured if self.at_least else self.measured / self.required
        return ratio - 1.0


def all_bars(results: dict[str, Any]) -> list[Bar]:
    """Returns all bars that the results allow to decide."""
    found: list[Bar] = []
    for workload, of_workload in results["workloads"].items():
        for link, of_link in of_workload["links"].items():
            by_name = of_link["variants"]
            seconds = {name: summary["median_seconds"] for name, summary in by_name.items()}
            where = f"{workload}, {link}"
            if workload == "mlp" and results["workers"] == 2:
                found += _against_stock(seconds, link, where)
            found += _against_floor(seconds, link, where)
            found += _dense(seconds, where)
            found += _against_peers(seconds, where)
            if link == UNSHAPED:
                found += _bytes(by_name, workload)
    return found


def _against_stock(seconds: dict[str, float], link: str, where: str) -> Iterator[Bar]:
    required = _SPEEDUP_OF_POWERSGD.get(link)
    if required and {"stock", "powersgd:4"} <= seconds.keys():
        speedup = seconds["stock"] / seconds["powersgd:4"]
        yield Bar(f"PowerSGD rank 4 faster than stock, {link}", where, required, speedup, at_least=True)


def _against_floor(seconds: dict[str, float], link: str, where: str) -> Iterator[Bar]:
    required, methods = _BEST_AGAINST_FLOOR.get(link), [name for name in METHODS if name in seconds]
    if required and methods and "floor" in seconds:
        best = min(methods, key=lambda name: seconds[name])
        ratio = seconds[best] / seconds["floor"]
        yield Bar(f"best method's step / floor, {link}", f"{where} ({best})", required, ratio)


def _dense(seconds: dict[str, float], where: str) -> Iterator[Bar]:
    if {"dense", "stock"} <= seconds.keys():
        yield Bar("dense tfdist / stock", where, 1.0, seconds["dense"] / seconds["stock"], noise=_NOISE)


def _against_peers(seconds: dict[str, float], where: str) -> Iterator[Bar]:
    for variant in map(BY_NAME.get, seconds):
        for framework, (what, added) in _AGAINST_PEERS.items():
            peers = [peer for peer in variant.peers if peer in seconds] if variant else []
            peers = [peer for peer in peers if BY_NAME[peer].framework == framework]
            if variant and peers:
                best = min(peers, key=lambda name: seconds[name])
                names = {"variant": variant.name, "peer": best}
                at, ratio = f"{where} ({added.format(**names)})", seconds[variant.name] / seconds[best]
                yield Bar(what.format(**names), at, 1.0, ratio, noise=_NOISE)


def _bytes(by_name: dict[str, Any], workload: str) -> Iterator[Bar]:
    for variant in map(BY_NAME.get, by_name):
        if variant and _states_bytes(variant):
            summary = by_name[variant.name]
            stated = summary["stated"].get("wire_bytes", 0.0) + summary["stated"].get("other_bytes", 0.0)
            if stated:
                off = abs(summary["payload_bytes"] / stated - 1.0)
                yield Bar("bytes on the wire off those stated", f"{workload} ({variant.name})", _STATED_BYTES_OFF, off)


def _states_bytes(variant: Variant) -> bool:
    return variant.is_method or variant.name == "dense"
