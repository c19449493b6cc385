"""Draws held-out loss against time and against bytes."""

import statistics
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter


def draw(curves: dict[str, Any], file: Path) -> None:
    """Draws a row for each task, means over the seeds.

    Args:
        curves: By task, seed and variant, the points of a training: `seconds`, `bytes`, `loss`.
        file: The PNG file to write.
    """
    figure = Figure(figsize=(13, 5 * len(curves)), layout="constrained")
    for row, (task, by_seed) in zip(figure.subplots(len(curves), 2, squeeze=False), curves.items(), strict=True):
        for axes, unit in zip(row, ("seconds", "bytes"), strict=True):
            for name, first in next(iter(by_seed.values())).items():
                points = [[one[name][part] for one in by_seed.values()] for part in range(len(first))]
                means = {
                    key: [statistics.mean(point[key] for point in part) for part in points] for key in (unit, "loss")
                }
                axes.plot(means[unit], means["loss"], "o-", markersize=4, label=name)
            axes.set(title=f"{task}: held-out loss against {unit}", xlabel=unit, ylabel="loss")
            axes.grid(alpha=0.3)
            if unit == "bytes":
                axes.set(xscale="log", xlabel="bytes sent by a worker")
                axes.xaxis.set_major_formatter(EngFormatter("B"))
        row[0].legend()
    figure.savefig(file)
