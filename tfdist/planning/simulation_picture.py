"""A simulation as a picture."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tfdist.planning.simulation import WEAK, SimulatedPoint, Simulation

# Of Okabe and Ito 2008, "Color universal design": distinct in all kinds of colour vision.
_COLOURS = {
    "uncompressed": "#000000",
    "compressed": "#0072B2",
    "sharded state": "#E69F00",
    "local updates": "#009E73",
    "stages": "#CC79A7",
    "accumulated": "#56B4E9",
}
_ENDINGS = (".svg", ".png", ".pdf")


def check_picture(path: Path) -> None:
    """Checks that a picture can be drawn, before anything is measured.

    Raises:
        ValueError: The ending of the file's name is unknown, its directory is missing, or so is Matplotlib.
    """
    if path.suffix.lower() not in _ENDINGS:
        raise ValueError(
            f"Unknown format of a picture. Received: {path}. Expected: a name that ends with one of "
            f"{', '.join(_ENDINGS)}."
        )
    if not path.absolute().parent.is_dir():
        raise ValueError(f"The directory of the picture is missing. Received: {path}. Expected: an existing directory.")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"Drawing needs Matplotlib. Received: {path} ({error}). Expected: an installed Matplotlib. Install it by "
            "pip install 'tfdist[plan]', or leave out the picture."
        ) from error


def draw(simulation: Simulation, path: Path) -> None:
    """Draws step time, efficiency, and where they are known goodput and price, against the number of workers.

    Raises:
        ValueError: As `check_picture`.
    """
    check_picture(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels: list[tuple[str, Callable[[SimulatedPoint], float | None], bool]] = [
        ("time of a step, s", lambda point: point.plan.step_seconds, True),
        ("efficiency, %", lambda point: 100 * point.efficiency, False),
    ]
    if simulation.cluster.failures is not None:
        panels.append(("goodput, %", lambda point: 100 * point.goodput, False))
    if simulation.cluster.price_per_hour is not None:
        panels.append(("price of a million samples", lambda point: point.cost_per_million_samples, True))
    figure = Figure(figsize=(3.6 * len(panels), 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (title, value, logarithmic) in zip(axes, panels, strict=True):
        _panel(axis, simulation, title, value, logarithmic=logarithmic)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)
    scaling = "the global batch grows with the workers" if simulation.cluster.scaling == WEAK else "one global batch"
    beyond = "" if all(point.exists for point in simulation.points) else "; dotted: more racks than there are"
    figure.suptitle(f"Simulated: {simulation.cluster.topology.text}, {scaling}{beyond}", fontsize=10)
    figure.savefig(path, dpi=150)


def _panel(
    axis: Any, simulation: Simulation, title: str, value: Callable[[SimulatedPoint], float | None], *, logarithmic: bool
) -> None:
    for kind in simulation.kinds():
        points = [(point, number) for point in simulation.of_kind(kind) if (number := value(point)) is not None]
        existing = [(point.workers, number) for point, number in points if point.exists]
        # The dotted line begins at the last of the existing points.
        beyond = existing[-1:] + [(point.workers, number) for point, number in points if not point.exists]
        for line, style, label in ((existing, "-", kind), (beyond, ":", None)):
            numbers = [workers for workers, _ in line]
            values = [number for _, number in line]
            axis.plot(numbers, values, style, color=_COLOURS[kind], label=label, marker=".", linewidth=1.5)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log") if logarithmic else axis.set_ylim(0, 105)
    numbers = sorted({point.workers for point in simulation.points})
    shown = numbers[:: -max(len(numbers) // 6, 1)][::-1]
    axis.set_xticks(shown, [str(number) for number in shown])
    axis.minorticks_off()
    axis.set_title(title, fontsize=10)
    axis.set_xlabel("workers", fontsize=9)
    axis.grid(color="#dddddd", linewidth=0.6)
    axis.tick_params(labelsize=8)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
