"""Draws predicted against measured step times."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot

_COLORS = {"cnn": "#0b4fa3", "mlp": "#c2410c", "text": "#15803d", "lstm": "#7c3aed", "gan": "#be185d"}


def draw(cells: list[dict[str, Any]], path: Path) -> None:
    """Draws a point for each model, link and method, with the lines of 10 and 25 % error."""
    figure, axes = pyplot.subplots(figsize=(5.6, 5.2), layout="constrained")
    labelled = set()
    for cell in cells:
        names = [name for name in cell["measured"] if name in cell["predicted"]]
        label = None if cell["model"] in labelled else cell["model"]
        labelled.add(cell["model"])
        axes.scatter(
            [1e3 * cell["measured"][name] for name in names],
            [1e3 * cell["predicted"][name] for name in names],
            s=14,
            color=_COLORS[cell["model"]],
            alpha=0.7,
            label=label,
            linewidths=0,
        )
    low, high = axes.get_xlim()
    ends = [max(low, 10.0), high * 1.2]
    axes.plot(ends, ends, color="#444", linewidth=1)
    for part, color in ((0.10, "#bbb"), (0.25, "#ddd")):
        axes.fill_between(ends, [(1 - part) * one for one in ends], [(1 + part) * one for one in ends], color=color)
        axes.collections[-1].set_zorder(0 if part < 0.2 else -1)
    axes.set(xscale="log", yscale="log", xlabel="measured ms a step", ylabel="predicted ms a step")
    axes.set_title("Step times, with 10 % and 25 % error", fontsize=10, loc="left")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)
