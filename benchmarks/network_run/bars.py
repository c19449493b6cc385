"""The bars: requirements that the measurements are compared with."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from network_run.variants import BY_NAME, METHODS, UNSHAPED, Variant

# Decided by the two digits that are shown.
_DIGITS = 2
_NOISE = 0.03
_STATED_BYTES_OFF = 0.02
_BEST_AGAINST_FLOOR = 1.10
# Variant, compared variant, and the largest ratio of their steps.
_DDP, _STOCK = "torch dense", "stock"
_RATIOS = (
    ("dense", _DDP, 0.95),
    ("dense, shared memory", _DDP, 0.95),
    ("bf16", "torch bf16", 1.00),
    ("fp16", "torch fp16", 1.00),
    ("dense", _STOCK, 0.95),
)
_MLP_AGAINST_STOCK = 0.60


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
            workers = results["workers"]
            where = f"{workload}, {link}" if workers == 2 else f"{workers} workers, {link}"
            found += _ratios(seconds, where)
            if link == UNSHAPED:
                found += _bytes(by_name, workload)
                if workload == "mlp" and workers == 2 and {"dense", _STOCK} <= seconds.keys():
                    ratio = seconds["dense"] / seconds[_STOCK]
                    found.append(Bar(f"dense / {_STOCK}, MLP", where, _MLP_AGAINST_STOCK, ratio, noise=_NOISE))
            if workers == 2:  # more workers than cores wait for each other
                found += _against_floor(seconds, where)
                found += _against_peers(seconds, where)
    return found


def _ratios(seconds: dict[str, float], where: str) -> Iterator[Bar]:
    for name, other, required in _RATIOS:
        if {name, other} <= seconds.keys():
            yield Bar(f"{name} / {other}", where, required, seconds[name] / seconds[other], noise=_NOISE)


def _against_floor(seconds: dict[str, float], where: str) -> Iterator[Bar]:
    methods = [name for name in METHODS if name in seconds]
    if methods and "floor" in seconds:
        best = min(methods, key=lambda name: seconds[name])
        ratio = seconds[best] / seconds["floor"]
        yield Bar("best method / floor", f"{where} ({best})", _BEST_AGAINST_FLOOR, ratio, noise=_NOISE)


def _against_peers(seconds: dict[str, float], where: str) -> Iterator[Bar]:
    """Methods for which PyTorch has no equal, and `fit` beside Keras on JAX: no slower than the nearest variant."""
    compared = {name for name, *_ in _RATIOS}
    for variant in map(BY_NAME.get, seconds):
        peers = [peer for peer in variant.peers if peer in seconds] if variant and variant.name not in compared else []
        for framework in {BY_NAME[peer].framework for peer in peers}:
            name = min((one for one in peers if BY_NAME[one].framework == framework), key=lambda one: seconds[one])
            at, ratio = f"{where} ({name})", seconds[variant.name] / seconds[name]
            yield Bar(f"{variant.name} / {framework}'s nearest", at, 1.0, ratio, noise=_NOISE)


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
