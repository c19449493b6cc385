"""Writes measured step times into the README and `docs/compression_measured.md`, between comments that name them."""

import json
import re
from pathlib import Path
from typing import Any

from network_run.bars import all_bars
from network_run.result_tables import bars_table, missed_table, table
from network_run.variants import BY_NAME, UNSHAPED

_ROOT = Path(__file__).resolve().parents[2]
_PAGES = ("README.md", "docs/compression_measured.md")
_DDP, _STOCK, _POWERSGD = "torch dense", "stock", "powersgd:4"


def write(results: Path) -> None:
    """Replaces what is between `<!-- network: NAME -->` and `<!-- network end -->`.

    Args:
        results: What `benchmarks/network.py` has written of two workers; results of more are beside it.
    """
    two = json.loads(results.read_text())
    more = [json.loads(file.read_text()) for file in sorted(results.parent.glob("network-[34].json"))]
    bars = [bar for one in (two, *more) for bar in all_bars(one)]
    missed = [bar for bar in bars if not bar.is_reached]
    parts = {
        "summary": _summary(two) + "\n",
        "machine": _machine(two) + "\n",
        "steps": table(_steps(two)),
        "bytes": table(_bytes(two)),
        "more workers": table(_more_workers(more)),
        "bars": bars_table(bars),
        "missed": missed_table(missed) if missed else "None.\n",
    }
    for page in (_ROOT / name for name in _PAGES):
        text = page.read_text(encoding="utf-8")
        for name, part in parts.items():
            pattern = rf"(<!-- network: {name} -->\n).*?(\n<!-- network end -->)"
            text = re.sub(pattern, lambda found, part=part: f"{found[1]}\n{part}{found[2]}", text, flags=re.DOTALL)  # type: ignore[misc]
        page.write_text(text, encoding="utf-8")


def _summary(results: dict[str, Any]) -> str:
    cells = [
        of_link["variants"] for of_model in results["workloads"].values() for of_link in of_model["links"].values()
    ]
    mlp = results["workloads"]["mlp"]["links"]
    gains = {link: _ratio(of_link["variants"], _STOCK, _POWERSGD) for link, of_link in mlp.items()}
    with_powersgd = ", ".join(f"{_plain(gain)} times as fast {_at(link)}" for link, gain in gains.items())
    return (
        f"Two workers with a core each: without compression a step takes {_range(cells, 'dense', _STOCK)} of the time "
        f"under stock `tf.distribute`, and {_range(cells, 'dense', _DDP)} of PyTorch DDP's on gloo. With "
        f'`compression="{_POWERSGD}"` the MLP is {with_powersgd} (`benchmarks/network.py`). Dotted: no exchange at all.'
    )


def _machine(results: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    return (
        f"{results['machine']['cores']} cores of {results['machine']['cpu']}; {versions}; medians of "
        f"{results['rounds']} rounds."
    )


def _steps(results: dict[str, Any]) -> list[list[str]]:
    links = {
        (workload, link): of_link["variants"]
        for workload, of_workload in results["workloads"].items()
        for link, of_link in of_workload["links"].items()
    }
    heading = [link if link != UNSHAPED else f"{workload}, {link}" for workload, link in links]
    rows = [["ms a step", *heading], ["---"] + ["---:"] * len(links)]
    for name in _names(results):
        rows.append([name, *(_milliseconds(of_link.get(name)) for of_link in links.values())])
    return rows


def _bytes(results: dict[str, Any]) -> list[list[str]]:
    workloads = {name: of_model["links"] for name, of_model in results["workloads"].items()}
    rows = [["MB that a worker sends in a step", *workloads], ["---"] + ["---:"] * len(workloads)]
    for name in _names(results):
        of_links = [next(iter(links.values()))["variants"].get(name) for links in workloads.values()]
        if name in BY_NAME and BY_NAME[name].sends and not BY_NAME[name].shares_memory:
            rows.append([name, *(f"{one['payload_bytes'] / 1e6:.3f}" if one else "" for one in of_links)])
    return rows


def _more_workers(documents: list[dict[str, Any]]) -> list[list[str]]:
    cells = {
        f"{one['workers']} workers, {link}": of_link["variants"]
        for one in documents
        for link, of_link in one["workloads"]["mlp"]["links"].items()
    }
    names = dict.fromkeys(name for of_link in cells.values() for name in of_link)
    rows = [["MLP, ms a step", *cells], ["---"] + ["---:"] * len(cells)]
    return rows + [[name, *(_milliseconds(of_link.get(name)) for of_link in cells.values())] for name in names]


def _names(results: dict[str, Any]) -> list[str]:
    of_links = (of_link for of_model in results["workloads"].values() for of_link in of_model["links"].values())
    return list(dict.fromkeys(name for of_link in of_links for name in of_link["variants"]))


def _milliseconds(summary: dict[str, Any] | None) -> str:
    if summary is None:
        return ""
    value = 1e3 * summary["median_seconds"]
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _range(cells: list[dict[str, Any]], name: str, other: str) -> str:
    ratios = [_ratio(one, name, other) for one in cells if {name, other} <= one.keys()]
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def _ratio(variants: dict[str, Any], name: str, other: str) -> float:
    return float(variants[name]["median_seconds"] / variants[other]["median_seconds"])


def _plain(factor: float) -> str:
    return f"{factor:.1f}" if factor < 10 else f"{factor:.0f}"


def _at(link: str) -> str:
    return "without a limit on the link" if link == UNSHAPED else f"at {link}"
