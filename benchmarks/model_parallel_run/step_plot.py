"""Draws step times of the pipelines by link, and the peaks of memory by stage."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes

from model_parallel_run.pipeline_variants import STAGED, WORKLOADS

_COLORS = {
    "tfdist 1f1b": "#0b4fa3",
    "tfdist gpipe": "#7fb2e5",
    "torch 1f1b": "#d1812a",
    "torch gpipe": "#efc08a",
    "tfdist tensor": "#0b4fa3",
    "torch tensor": "#d1812a",
    "jax tensor": "#5c9e5c",
}
_WIDTH = 0.8 / len(STAGED)


def draw(results: dict[str, Any], path: Path) -> None:
    """Draws a panel for each workload, and one for memory.

    Args:
        results: As `benchmarks/model_parallel.py` writes them.
        path: Of the PNG file.
    """
    workloads, memory = results.get("workloads", {}), results.get("memory")
    count = len(workloads) + bool(memory)
    figure, panels = pyplot.subplots(1, count, figsize=(4.2 * count + 0.4, 4.2), squeeze=False, layout="constrained")
    for panel, (name, of_workload) in zip(panels[0], workloads.items(), strict=False):
        links = of_workload["links"]
        heights = {
            variant: [of_link["variants"][variant]["median_seconds"] * 1e3 for of_link in links.values()]
            for variant in [one.name for one in WORKLOADS[name].variants if one.schedule]
        }
        _bars(panel, list(links), heights)
        title = f"{WORKLOADS[name].title}, {of_workload['parameters'] / 1e6:.1f} M parameters, 2 workers"
        panel.set_title(title, fontsize=10.5, loc="left")
        panel.set_ylabel("step, ms")
    if memory:
        panel = panels[0][-1]
        stages = [f"stage {stage}" for stage in range(len(memory[STAGED[0]]))]
        _bars(panel, stages, {variant: [grown / 1e6 for grown in memory[variant]] for variant in STAGED})
        panel.set_title("Peak of activations, 4 stages", fontsize=10.5, loc="left")
        panel.set_ylabel("growth of a process, MB")
    of_panels = [panel.get_legend_handles_labels() for panel in panels[0]]
    known = {label: handle for handles, labels in of_panels for handle, label in zip(handles, labels, strict=True)}
    labels, handles = list(known), list(known.values())
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 4), frameon=False, fontsize=9.5)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _bars(panel: Axes, groups: list[str], heights: dict[str, list[float]]) -> None:
    for number, (variant, of_groups) in enumerate(heights.items()):
        places = [group + (number - (len(heights) - 1) / 2) * _WIDTH for group in range(len(groups))]
        drawn = panel.bar(places, of_groups, _WIDTH * 0.92, color=_COLORS[variant], label=variant)
        panel.bar_label(drawn, fmt="%.0f", fontsize=7, padding=1)
    panel.set_xticks(range(len(groups)), groups)
    panel.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
