"""Formats the results as Markdown tables."""

from typing import Any

from network_run.bars import Bar, all_bars
from network_run.variants import NOT_COMPILED, UNSHAPED


def markdown(results: dict[str, Any]) -> str:
    """Returns a table of each workload, one of what compilers change, one of the bars, and one of the bars not reached.

    Args:
        results: As `benchmarks/network.py` writes them.
    """
    parts = [_heading(results)]
    for workload, of_workload in results["workloads"].items():
        parts.append(_workload_table(workload, of_workload))
    ratios = _compiled_rows(results)
    if ratios:
        parts += ["Steps with XLA or `torch.compile` / without it:\n", table(ratios)]
    bars = all_bars(results)
    if bars:
        parts.append("Bars, each with the place where it is most nearly missed or most clearly missed:\n")
        parts.append(bars_table(bars))
    missed = [bar for bar in bars if not bar.is_reached]
    if missed:
        parts += ["Where a bar is not reached:\n", missed_table(missed)]
    return "\n".join(parts)


def _heading(results: dict[str, Any]) -> str:
    machine = results["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    return (
        f"{results['workers']} workers, {machine['cores']} cores of {machine['cpu']}; {versions}. Medians of a step, "
        "in milliseconds, with quartiles; megabytes that a worker sends per step, without headers.\n"
    )


def _workload_table(workload: str, of_workload: dict[str, Any]) -> str:
    links = of_workload["links"]
    counted = links.get(UNSHAPED) or next(iter(links.values()))
    rows = [
        [f"{workload}, {of_workload['parameters'] / 1e6:.1f} M parameters", "MB per step", *links],
        ["---"] + ["---:"] * (1 + len(links)),
    ]
    for name in counted["variants"]:
        times = [_milliseconds(of_link["variants"].get(name)) for of_link in links.values()]
        rows.append([name, f"{counted['variants'][name]['payload_bytes'] / 1e6:.3f}", *times])
    reached = [f"{of_link['achieved_bits_per_second'] / 1e6:.1f} Mbit/s" for of_link in links.values()]
    rows.append(["(a plain transfer reaches)", "", *reached])
    return table(rows)


def _compiled_rows(results: dict[str, Any]) -> list[list[str]]:
    """A row of each compiled variant and workload that was also measured without the compiler, below a heading."""
    rows = []
    links = list(dict.fromkeys(link for of_workload in results["workloads"].values() for link in of_workload["links"]))
    for workload, of_workload in results["workloads"].items():
        for name, plain in NOT_COMPILED.items():
            pairs = [_pair(of_workload["links"].get(link), name, plain) for link in links]
            if any(pairs):
                ratios = [f"{pair[0] / pair[1]:.2f}" if pair else "not measured" for pair in pairs]
                rows.append([name, workload, *ratios])
    heading = [["variant", "model", *links], ["---", "---"] + ["---:"] * len(links)]
    return heading + rows if rows else []


def _pair(of_link: dict[str, Any] | None, name: str, plain: str) -> tuple[float, float] | None:
    by_name = of_link["variants"] if of_link else {}
    if not {name, plain} <= by_name.keys():
        return None
    return by_name[name]["median_seconds"], by_name[plain]["median_seconds"]


def _milliseconds(summary: dict[str, Any] | None) -> str:
    if summary is None:
        return "not measured"
    low, high = (_digits(seconds * 1e3) for seconds in summary["quartiles_seconds"])
    return f"{_digits(summary['median_seconds'] * 1e3)} ({low}–{high})"


def _digits(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def bars_table(bars: list[Bar]) -> str:
    """Returns a row of each bar, with the place where it is most nearly missed or most clearly missed."""
    groups: dict[str, list[Bar]] = {}
    for bar in bars:
        groups.setdefault(bar.what, []).append(bar)
    rows = [["bar", "required", "worst measured", "where", "reached"], ["---", "---:", "---:", "---", "---"]]
    for what, group in groups.items():
        worst = max(group, key=lambda bar: bar.missed_by)
        count = sum(bar.is_reached for bar in group)
        outcome = "yes" if count == len(group) else f"{count} of {len(group)}"
        rows.append([what, _required(worst), f"{worst.measured:.2f}", worst.where, outcome])
    return table(rows)


def missed_table(bars: list[Bar]) -> str:
    """Returns a row of each place where a bar is not reached."""
    rows = [["bar", "where", "required", "measured", "missed by"], ["---", "---", "---:", "---:", "---:"]]
    for bar in bars:
        rows.append([bar.what, bar.where, _required(bar), f"{bar.measured:.2f}", f"{bar.missed_by:.0%}"])
    return table(rows)


def _required(bar: Bar) -> str:
    noise = f", within {bar.noise:.0%}" if bar.noise else ""
    return f"{'≥' if bar.at_least else '≤'} {bar.required:.2f}{noise}"


def table(rows: list[list[str]]) -> str:
    """Returns rows of cells as a Markdown table."""
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
