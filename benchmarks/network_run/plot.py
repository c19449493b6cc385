"""Draws step time against bandwidth."""

import math
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes

from network_run.variants import LINKS, METHODS

# Position of the unshaped link on the axis.
_UNSHAPED_AT = 10_000_000_000
_TITLES = {"cnn": "CNN", "mlp": "MLP", "text": "Transformer, text"}
_ALWAYS = "powersgd:4"
_NAMES = {
    "floor": "no exchange (floor)",
    "stock": "stock tf.distribute",
    "dense": "tfdist, dense",
    _ALWAYS: "tfdist, PowerSGD 4",
    "torch dense": "PyTorch DDP, dense",
    "jax dense": "Keras on JAX, dense",
    "torch powersgd:4, one bucket": "PyTorch DDP, PowerSGD 4",
}
_STYLES: dict[str, dict[str, Any]] = {
    "floor": {"color": "#8c8c8c", "linestyle": ":", "marker": "", "linewidth": 1.6},
    "stock": {"color": "#222222", "marker": "s"},
    "torch dense": {"color": "#d1812a", "marker": "s", "linestyle": "--"},
    "jax dense": {"color": "#8a4fb0", "marker": "s", "linestyle": "--"},
    "dense": {"color": "#7fb2e5", "marker": "o"},
    "torch powersgd:4, one bucket": {"color": "#d1812a", "marker": "D"},
    _ALWAYS: {"color": "#0b4fa3", "marker": "o", "linewidth": 2.4},
}
_BEST_STYLE = {"color": "#2a9a62", "marker": "^", "linewidth": 2.0}


def draw(results: dict[str, Any], path: Path) -> None:
    """Draws one panel for each workload.

    Args:
        results: As `benchmarks/network.py` writes them.
        path: Of the PNG file.
    """
    workloads = results["workloads"]
    styles = dict(_STYLES)
    best = _best_method(results)
    if best:
        styles[best] = _BEST_STYLE
    width = 4.4 * len(workloads) + 0.6
    figure, panels = pyplot.subplots(1, len(workloads), figsize=(width, 4.6), squeeze=False, layout="constrained")
    for panel, (workload, of_workload) in zip(panels[0], workloads.items(), strict=True):
        _draw_workload(panel, of_workload["links"], styles)
        title = f"{_TITLES.get(workload, workload)}, {of_workload['parameters'] / 1e6:.1f} M parameters"
        panel.set_title(title, fontsize=11, loc="left")
    panels[0][0].set_ylabel("step time, ms")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=1 + len(workloads), frameon=False, fontsize=9.5)
    figure.suptitle(f"Step time against bandwidth, {results['workers']} workers", x=0.01, ha="left")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _best_method(results: dict[str, Any]) -> str | None:
    """The fastest method except PowerSGD, by the geometric mean over all workloads and links."""
    logs: dict[str, list[float]] = {}
    for of_workload in results["workloads"].values():
        for of_link in of_workload["links"].values():
            for name, summary in of_link["variants"].items():
                if name in METHODS and name != _ALWAYS:
                    logs.setdefault(name, []).append(math.log(summary["median_seconds"]))
    return min(logs, key=lambda name: sum(logs[name]) / len(logs[name])) if logs else None


def _draw_workload(panel: Axes, links: dict[str, Any], styles: dict[str, dict[str, Any]]) -> None:
    places = sorted((LINKS[link] or _UNSHAPED_AT, link) for link in links)
    for name, style in styles.items():
        measured = [(at, links[link]["variants"][name]) for at, link in places if name in links[link]["variants"]]
        if not measured:
            continue
        milliseconds = [summary["median_seconds"] * 1e3 for _, summary in measured]
        label = _NAMES.get(name, f"tfdist, {name}")
        panel.plot(
            [at for at, _ in measured], milliseconds, **{"markersize": 5, "linewidth": 1.6, **style}, label=label
        )
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xticks([at for at, _ in places], [link.replace(" ", "\n") for _, link in places])
    panel.minorticks_off()
    panel.yaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
    panel.yaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, position: f"{value:g}"))
    panel.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    panel.spines[["top", "right"]].set_visible(False)
