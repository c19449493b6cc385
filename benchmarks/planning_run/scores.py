"""How good predictions are: errors of step times, and the chosen plan against the best measured one."""

import statistics
from typing import Any

CELL_BAR, WORST_BAR = 1.10, 1.25
MEDIAN_BAR, NINETY_BAR = 0.10, 0.25
MEMORY_BAR, MORE_WORKERS_BAR = 0.15, 0.20


def errors(cells: list[dict[str, Any]]) -> list[float]:
    """Returns the relative errors of all predictions that were measured.

    >>> errors([{"predicted": {"a": 1.1, "b": 2.0}, "measured": {"a": 1.0}}])
    [0.10000000000000009]
    """
    return [
        abs(cell["predicted"][name] / seconds - 1.0)
        for cell in cells
        for name, seconds in cell["measured"].items()
        if name in cell["predicted"]
    ]


def quantile(values: list[float], part: float) -> float:
    """Returns the value below which a part of them lies.

    >>> quantile([0.1, 0.2, 0.3], 0.5)
    0.2
    """
    if part == 0.5:
        return statistics.median(values)
    return statistics.quantiles(values, n=100, method="inclusive")[round(100 * part) - 1]


def chosen(cell: dict[str, Any]) -> str:
    """Returns the variant of the best plan, of those that were measured."""
    return min((name for name in cell["predicted"] if name in cell["measured"]), key=list(cell["order"]).index)


def regret(cell: dict[str, Any]) -> float:
    """Returns the measured time of the chosen plan, of the best measured one.

    >>> regret({"predicted": {"a": 1.0, "b": 2.0}, "measured": {"a": 1.2, "b": 1.0}, "order": ["a", "b"]})
    1.2
    """
    return float(cell["measured"][chosen(cell)] / min(cell["measured"].values()))


def print_grid(title: str, cells: list[dict[str, Any]]) -> None:
    """Prints a table of cells, and the bars."""
    print(f"\n{title}\n\n| model, link | chosen | predicted | measured | best measured | of the best |")
    print("|---|---|---:|---:|---|---:|")
    for cell in cells:
        name, best = chosen(cell), min(cell["measured"], key=cell["measured"].get)
        predicted, measured = (1e3 * cell[kind][name] for kind in ("predicted", "measured"))
        shown = f"{best}, {1e3 * cell['measured'][best]:.1f} ms"
        print(
            f"| {cell['model']}, {cell['link']} | {name} | {predicted:.1f} ms | {measured:.1f} ms | {shown} "
            f"| {regret(cell):.2f} |"
        )
    regrets, off = [regret(cell) for cell in cells], errors(cells)
    good = sum(one <= CELL_BAR for one in regrets)
    print(f"\nat most {CELL_BAR} times the best: {good} of {len(cells)}; worst {max(regrets):.2f} (bar {WORST_BAR})")
    print(
        f"error of {len(off)} step times: median {quantile(off, 0.5):.1%} (bar {MEDIAN_BAR:.0%}), "
        f"90 % below {quantile(off, 0.9):.1%} (bar {NINETY_BAR:.0%})"
    )


def print_ratios(title: str, rows: list[dict[str, Any]], bar: float, unit: float, digits: int) -> None:
    """Prints predictions beside measurements, with the largest error."""
    print(f"\n{title}\n\n| | predicted | measured | error |\n|---|---:|---:|---:|")
    for row in rows:
        error = row["predicted"] / row["measured"] - 1
        print(
            f"| {row['what']} | {row['predicted'] / unit:.{digits}f} | {row['measured'] / unit:.{digits}f} "
            f"| {error:+.1%} |"
        )
    worst = max(abs(row["predicted"] / row["measured"] - 1) for row in rows)
    print(f"\nlargest error {worst:.1%} (bar {bar:.0%})")
