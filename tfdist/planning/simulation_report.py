"""A simulation as text for a terminal, and as a picture."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tfdist.planning.plan_table import plan_name
from tfdist.planning.simulation import WEAK, SimulatedPoint, Simulation
from tfdist.utils.formatting import align_columns, counted, format_duration, format_seconds

_BEYOND = "*"
_MUCH = 0.3  # the part of a step from which reading data is worth a note


def simulation_text(simulation: Simulation) -> str:
    """Returns the tables and notes of a simulation."""
    cluster = simulation.cluster
    if not simulation.points:
        return _without_plans(simulation)
    kinds, numbers = simulation.kinds(), sorted({point.workers for point in simulation.points})
    batch = "each worker computes" if cluster.scaling == WEAK else "workers divide"
    scaling = f"{cluster.scaling} scaling ({batch} the program's batch)"
    lines = [f"Simulated on {cluster.topology.text}, {scaling}: time of a step, efficiency"]
    rows = [["workers", *kinds]]
    by_place = {(point.kind, point.workers): point for point in simulation.points}
    for number in numbers:
        rows.append([_number(by_place, kinds, number), *(_step(by_place.get((kind, number))) for kind in kinds)])
    lines += _table(rows)
    lines += ["", "The fastest of them:"]
    lines += _table([_heading(simulation), *(_details(simulation, point) for point in simulation.best())], left=[1])
    return "\n".join([*lines, *_notes(simulation)])


def _without_plans(simulation: Simulation) -> str:
    rows = "The workers' samples may be less than one each" if simulation.cluster.scaling != WEAK else "Nothing fits"
    return f"There is no plan for any of the simulated numbers of workers: {rows}, or the memory is too small."


def _table(rows: Sequence[Sequence[str]], left: Sequence[int] = ()) -> list[str]:
    return ["  " + line for line in align_columns(rows, left=left)]


def _number(points: dict[tuple[str, int], SimulatedPoint], kinds: Sequence[str], number: int) -> str:
    exists = all(points[kind, number].exists for kind in kinds if (kind, number) in points)
    return f"{number}{'' if exists else _BEYOND}"


def _step(point: SimulatedPoint | None) -> str:
    return "-" if point is None else f"{format_seconds(point.plan.step_seconds)}, {_percent(point.efficiency)}"


def _heading(simulation: Simulation) -> list[str]:
    cluster = simulation.cluster
    heading = ["workers", "plan", "samples/s", "wait for slowest"]
    if cluster.failures is not None:
        heading += ["save every", "goodput", "samples/s left"]
    if cluster.price_per_hour is not None:
        heading += ["price of 1M samples"] + (["of an epoch"] if simulation.samples_of_epoch else [])
    return heading


def _details(simulation: Simulation, point: SimulatedPoint) -> list[str]:
    plan = point.plan
    cells = [
        f"{point.workers}{'' if point.exists else _BEYOND}",
        plan_name(plan),
        f"{point.samples_per_second:,.0f}",
        _percent(point.straggler_seconds / plan.step_seconds),
    ]
    if simulation.cluster.failures is not None:
        cells += [
            "-" if point.checkpoint_seconds is None else _interval(point.checkpoint_seconds),
            _percent(point.goodput),
            f"{point.samples_per_second * point.goodput:,.0f}",
        ]
    if simulation.cluster.price_per_hour is not None:
        cost, epoch = point.cost_per_million_samples, simulation.samples_of_epoch
        cells += ["-" if cost is None else f"{cost:.3g}"]
        if epoch:
            cells += ["-" if cost is None else f"{cost * epoch / 1e6:.3g}"]
    return cells


def _interval(seconds: float) -> str:
    return format_duration(seconds) if seconds >= 10 else format_seconds(seconds)


def _percent(part: float) -> str:
    """Formats a part.

    >>> _percent(0.9996), _percent(0.5), _percent(0.0012), _percent(0.0)
    ('100 %', '50 %', '0.12 %', '0 %')
    """
    percent = 100 * part
    return f"{percent:.0f} %" if percent >= 9.95 or percent == 0 else f"{percent:.2g} %"


def _notes(simulation: Simulation) -> list[str]:
    topology, notes = simulation.cluster.topology, []
    if any(not point.exists for point in simulation.points):
        notes.append(
            f"{_BEYOND} {topology.text} has {counted(topology.hosts or 0, 'host')}. For more workers, more racks like "
            "these are assumed."
        )
    slow = [point.workers for point in simulation.best() if point.data_seconds > _MUCH * point.plan.step_seconds]
    if slow and not simulation.cluster.files_are_sharded:
        notes.append(
            f"From {slow[0]} workers on, reading the data of all workers on each of them is much of a step. With "
            "separate files for each worker (AutoShardPolicy.FILE), add --sharded-files."
        )
    if simulation.left_out:
        numbers = ", ".join(str(number) for number in simulation.left_out)
        notes.append(f"No plan for {numbers} workers: less than one sample each, or not enough memory.")
    return ["", *notes] if notes else []


# Source: Okabe and Ito 2008, "Color universal design": distinct in all kinds of colour vision.
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
    """Checks that a picture can be drawn, before anything is measured; otherwise raises a ValueError."""
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
    """Draws step time, efficiency, and where they are known goodput and price, against the number of workers."""
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
