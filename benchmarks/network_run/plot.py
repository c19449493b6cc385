"""Draws the steps of stock TensorFlow, PyTorch DDP and tfdist on each link."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes

_TITLES = {"cnn": "CNN", "mlp": "MLP", "text": "Transformer"}
_BARS = {
    "stock": ("tf.distribute", "#b9b9b9"),
    "torch dense": ("PyTorch DDP", "#e39a4d"),
    "dense": ("tfdist", "#7fb2e5"),
    "powersgd:4": ("tfdist, PowerSGD 4", "#0b4fa3"),
}
_WIDTH = 0.8 / len(_BARS)


def draw(results: dict[str, Any], path: Path) -> None:
    """Draws a panel for each workload, with a group of bars for each link.

    Args:
        results: As `benchmarks/network.py` writes them.
        path: Of the PNG file.
    """
    workloads = results["workloads"]
    size = (3.6 * len(workloads) + 0.4, 3.1)
    figure, panels = pyplot.subplots(1, len(workloads), figsize=size, squeeze=False, layout="constrained", sharey=True)
    for panel, (workload, of_workload) in zip(panels[0], workloads.items(), strict=True):
        _draw_workload(panel, of_workload["links"])
        title = f"{_TITLES.get(workload, workload)}, {of_workload['parameters'] / 1e6:.1f} M parameters"
        panel.set_title(title, fontsize=10, loc="left")
    panels[0][0].set(ylabel="of tf.distribute's step; labels: ms", ylim=(0, 1.06 * panels[0][0].get_ylim()[1]))
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _draw_workload(panel: Axes, links: dict[str, Any]) -> None:
    seconds = {
        link: {name: summary["median_seconds"] for name, summary in of_link["variants"].items()}
        for link, of_link in links.items()
        if "stock" in of_link["variants"]
    }
    for index, (name, (label, color)) in enumerate(_BARS.items()):
        measured = [
            (at, of_link[name], of_link["stock"]) for at, of_link in enumerate(seconds.values()) if name in of_link
        ]
        places = [at + (index - (len(_BARS) - 1) / 2) * _WIDTH for at, *_ in measured]
        bars = panel.bar(places, [one / stock for _, one, stock in measured], _WIDTH * 0.94, color=color, label=label)
        texts = [f"{1e3 * one:.0f}" if one < 1 else f"{one:.1f} s" for _, one, _ in measured]
        panel.bar_label(bars, texts, fontsize=6, padding=1.5)
    for at, of_link in enumerate(seconds.values()):
        if "floor" in of_link:
            part, label = of_link["floor"] / of_link["stock"], "no exchange" if at == 0 else None
            panel.hlines(part, at - 0.44, at + 0.44, colors="#444", linestyles=":", linewidth=1.2, label=label)
    panel.set_xticks(range(len(seconds)), list(seconds))
    panel.tick_params(axis="x", length=0)
    panel.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0))
    panel.set_axisbelow(True)
    panel.grid(axis="y", color="#e8e8e8", linewidth=0.8)
    panel.spines[["top", "right", "left"]].set_visible(False)
