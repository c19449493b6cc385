"""Measures the effect of gradient compression on learning: accuracy or loss after equally many steps, against dense.

    python benchmarks/accuracy.py                              all methods, three seeds, both tasks
    python benchmarks/accuracy.py --methods bf16 powersgd:4    these methods, and dense
    python benchmarks/accuracy.py --from-json                  prints and draws the last results again

The tasks are the digits network of `examples/digits.py` (held-out accuracy) and a small transformer on the sources of
the standard library (held-out loss). Two replicas in one process train with every method from the same initial weights
on the same batches. Writes `accuracy.json` and `accuracy.png` to `benchmarks/results`, and prints a table.
"""

import argparse
import functools
import json
import multiprocessing
import os
import platform
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import digits
import digits_dataset
import keras
import numpy as np
import tensorflow as tf
import text_data
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import EngFormatter, PercentFormatter
from matplotlib.transforms import Bbox
from workloads import build_transformer

from tfdist.compression import Policy
from tfdist.strategies import MirroredStrategy

Arrays = tuple[np.ndarray, np.ndarray]

DENSE = "dense"
WARM_UP_STEPS = 50
METHODS: dict[str, Any] = {
    DENSE: None,
    **{name: name for name in "bf16 fp16 fp8 int8 int4 sign topk:0.01 randomk:0.01 powersgd:4 powersgd:1".split()},
    **{f"{name}, warm-up": Policy(name, dense_steps=WARM_UP_STEPS) for name in ("topk:0.01", "powersgd:4")},
}
SEEDS = (0, 1, 2)

_FILE = Path(__file__).parent / "results" / "accuracy.json"
_TEXT = {"vocabulary_size": 2000, "sequence": 64, "width": 64}


@dataclass(frozen=True)
class Task:
    """A training task and its requirement.

    Attributes:
        metric: Measured on held-out data: `accuracy` or `loss`.
        unit: Of `worse_by` and `bar`.
        bar: How much worse than dense a method may be.
        steps: Number of batches in a training.
        batch_size: Over both replicas.
        learning_rate: The peak; it rises for a twentieth of the steps, then falls along a cosine to a tenth.
        build: Builds the model; its outputs are logits.
        data: Given a seed and a number of examples, returns the training examples in order, and the held-out ones.
    """

    metric: str
    unit: str
    bar: float
    steps: int
    batch_size: int
    learning_rate: float
    build: Callable[[], keras.Model]
    data: Callable[[int, int], tuple[Arrays, Arrays]]

    def worse_by(self, dense: float, metric: float) -> float:
        """Returns how much worse than dense a method with `metric` is, in `unit`."""
        return 100 * (dense - metric if self.metric == "accuracy" else metric / dense - 1)


@dataclass(frozen=True)
class Run:
    """The result of a training: the held-out metric, and the mean gradient bytes per step and replica."""

    task: str
    method: str
    seed: int
    metric: float
    bytes_per_step: float


def digits_data(seed: int, examples: int) -> tuple[Arrays, Arrays]:
    """Returns the training images, in a new random order for each pass, and the held-out images."""
    train, held_out = (
        tuple(part.numpy() for part in dataset.batch(len(dataset)).get_single_element())
        for dataset in digits_dataset.load("digits", None)
    )
    random, images = np.random.default_rng(seed), len(train[0])
    order = np.concatenate([random.permutation(images) for _ in range(-(-examples // images))])[:examples]
    return (train[0][order], train[1][order]), held_out


def python_data(seed: int, examples: int) -> tuple[Arrays, Arrays]:
    """Returns random windows of the training files, and evenly spaced ones of the held-out files."""
    text, length = text_data.load(_TEXT["vocabulary_size"]), _TEXT["sequence"]
    even = np.linspace(0, len(text.held_out) - length - 1, 256, dtype=int)
    train = text_data.random_windows(text.train, seed=seed, count=examples, length=length)
    return train, text_data.windows(text.held_out, even, length)


TASKS = {
    "digits": Task(
        metric="accuracy",
        unit="points",
        bar=0.5,
        steps=360,
        batch_size=64,
        learning_rate=5e-3,
        build=functools.partial(digits.build_model, (8, 8, 1)),
        data=digits_data,
    ),
    "text": Task(
        metric="loss",
        unit="%",
        bar=2.0,
        steps=300,
        batch_size=16,
        learning_rate=5e-3,
        build=functools.partial(build_transformer, **_TEXT),
        data=python_data,
    ),
}


def train(name: str, method: str, seed: int) -> Run:
    """Trains a task's model with compressed gradients on two replicas of this process."""
    task = TASKS[name]
    batches, held_out = task.data(seed, task.steps * task.batch_size)
    strategy = MirroredStrategy(["CPU:0", "CPU:1"], compression=METHODS[method])
    keras.utils.set_random_seed(seed)
    rise = task.steps // 20
    learning_rate = keras.optimizers.schedules.CosineDecay(
        0.0, task.steps - rise, alpha=0.1, warmup_target=task.learning_rate, warmup_steps=rise
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with strategy.scope():
        model = task.build()
        model.compile(keras.optimizers.Adam(learning_rate), loss, metrics=["accuracy"])
    before = strategy.communication
    model.fit(*batches, batch_size=task.batch_size, shuffle=False, verbose=0)
    bytes_per_step = (strategy.communication - before).wire_bytes / task.steps
    logs = model.evaluate(*held_out, batch_size=task.batch_size, verbose=0, return_dict=True)
    return Run(name, method, seed, logs[task.metric], bytes_per_step)


def train_all_methods(cores: Any, task: str, seed: int, methods: list[str]) -> list[Run]:
    """Trains with one method after another on a separate core. Call this in a new process."""
    core = cores.get()
    try:
        os.sched_setaffinity(0, {core})
        cpus = tf.config.list_physical_devices("CPU")
        tf.config.set_logical_device_configuration(cpus[0], [tf.config.LogicalDeviceConfiguration()] * 2)
        runs = []
        for method in methods:
            runs.append(train(task, method, seed))
            keras.backend.clear_session()
            print(f"{task}, seed {seed}, {method}: {TASKS[task].metric} {runs[-1].metric:.4f}", flush=True)
        return runs
    finally:
        cores.put(core)


def measure(methods: list[str]) -> list[Run]:
    """Runs all trainings, each task and seed in a separate process, one per core at a time."""
    context = multiprocessing.get_context("spawn")  # TensorFlow does not work after a fork
    jobs = [(task, seed) for task in reversed(TASKS) for seed in SEEDS]  # long trainings first
    cores = sorted(os.sched_getaffinity(0))
    pool = ProcessPoolExecutor(len(cores), mp_context=context, max_tasks_per_child=1)
    with context.Manager() as manager, pool:
        free_cores = manager.Queue()
        for core in cores:
            free_cores.put(core)
        done = [pool.submit(train_all_methods, free_cores, task, seed, methods) for task, seed in jobs]
        return [run for future in done for run in future.result()]


def summarize(runs: list[Run]) -> dict[str, Any]:
    """Compares each method with dense, seed by seed."""
    summary: dict[str, Any] = {}
    for name, task in TASKS.items():
        of_task = [run for run in runs if run.task == name]
        dense = {run.seed: run.metric for run in of_task if run.method == DENSE}
        seeds: dict[str, list[dict[str, float]]] = {}
        for run in of_task:
            measured = {"metric": run.metric, "bytes_per_step": run.bytes_per_step}
            worse_by = task.worse_by(dense[run.seed], run.metric)
            seeds.setdefault(run.method, []).append({"seed": run.seed, **measured, "worse_by": worse_by})
        methods: dict[str, Any] = {}
        for method, of_method in seeds.items():
            means = {key: float(np.mean([seed[key] for seed in of_method])) for key in of_method[0] if key != "seed"}
            methods[method] = {**means, "seeds": of_method}
        facts = {key: getattr(task, key) for key in ("metric", "unit", "bar", "steps", "batch_size", "learning_rate")}
        summary[name] = {**facts, "methods": methods}
    return summary


def print_tables(summary: dict[str, Any]) -> None:
    """Prints a table for each task; "worse" is the mean over the seeds and, in parentheses, the worst seed."""
    for name, task in summary.items():
        unit, dense_bytes = task["unit"], task["methods"][DENSE]["bytes_per_step"]
        print(f"\n{name}: {task['steps']} steps of {task['batch_size']}, means of {len(SEEDS)} seeds\n")
        print(f"| method | kB per step | of dense | {task['metric']} | worse (worst seed) | bar {task['bar']} {unit} |")
        print("|---|---|---|---|---|---|")
        for method, result in task["methods"].items():
            over = result["worse_by"] - task["bar"]
            metric = f"{result['metric']:.2%}" if task["metric"] == "accuracy" else f"{result['metric']:.3f}"
            worse = f"{result['worse_by']:+.2f} ({max(seed['worse_by'] for seed in result['seeds']):+.2f}) {unit}"
            verdict = "reached" if over <= 0 else f"missed by {over:.2f} {unit}"
            size, part = result["bytes_per_step"] / 1000, result["bytes_per_step"] / dense_bytes
            print(f"| {method} | {size:,.1f} | {part:.1%} | {metric} | {worse} | {verdict} |")


def draw(summary: dict[str, Any]) -> None:
    """Draws each task's metric against the bytes per step."""
    figure = Figure(figsize=(14, 6), layout="constrained")
    renderer = FigureCanvasAgg(figure).get_renderer()
    for axes, (name, task) in zip(figure.subplots(1, len(summary)), summary.items(), strict=True):
        axes.set_title(f"{name} after {task['steps']} steps, means and single seeds")
        _draw_points(axes, task)
    figure.draw_without_rendering()
    for axes, task in zip(figure.axes, summary.values(), strict=True):
        _label_points(axes, task, renderer)
    figure.savefig(_FILE.with_suffix(".png"), dpi=figure.dpi)


def _draw_points(axes: Any, task: dict[str, Any]) -> None:
    dense, bar = task["methods"][DENSE]["metric"], task["bar"] / 100
    limit = dense - bar if task["metric"] == "accuracy" else dense * (1 + bar)
    axes.axhspan(dense, limit, color="tab:green", alpha=0.15, label=f"at most {task['bar']:g} {task['unit']} worse")
    axes.axhline(dense, color="tab:green", linewidth=1, label=DENSE)
    for index, result in enumerate(task["methods"].values()):
        axes.plot(result["bytes_per_step"], result["metric"], "o", color=f"C{index}", markersize=8)
        for seed in result["seeds"]:
            axes.plot(seed["bytes_per_step"], seed["metric"], ".", color=f"C{index}", markersize=4)
    if task["metric"] == "accuracy":
        axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.set(xscale="log", xlabel="gradient bytes per step and replica", ylabel=f"held-out {task['metric']}")
    axes.xaxis.set_major_formatter(EngFormatter("B"))
    axes.margins(x=0.12, y=0.1)
    axes.grid(alpha=0.3)
    axes.legend()


def _label_points(axes: Any, task: dict[str, Any], renderer: Any) -> None:
    """Writes each method's name beside its point, at the nearest free position."""
    points = [(result["bytes_per_step"], result["metric"]) for result in task["methods"].values()]
    taken = [Bbox(axes.transData.transform([point, point]) + [[-5], [5]]) for point in points]
    taken.append(axes.get_legend().get_window_extent())
    places = sorted(((x, y) for x in (-40, -8, 8, 40) for y in range(-96, 97, 12)), key=np.linalg.norm)
    for index, (name, point) in enumerate(zip(task["methods"], points, strict=True)):
        line = {"arrowstyle": "-", "color": f"C{index}"}
        for x, y in places:
            style = {"color": f"C{index}", "va": "center", "ha": "left" if x > 0 else "right", "arrowprops": line}
            label = axes.annotate(name, point, (x, y), textcoords="offset points", **style)
            label.update_positions(renderer)
            box = Text.get_window_extent(label)  # of the text; that of the annotation includes its line
            if not box.count_overlaps(taken) and all(axes.bbox.contains(*corner) for corner in (box.min, box.max)):
                break
            label.remove()
        taken.append(box)


def main() -> int:
    """Measures or reads earlier results; prints the tables and draws."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD")
    parser.add_argument("--from-json", action="store_true", help="read accuracy.json instead of training")
    arguments = parser.parse_args()
    if arguments.from_json:
        summary = json.loads(_FILE.read_text())["tasks"]
    else:
        summary = summarize(measure([DENSE, *(method for method in arguments.methods if method != DENSE)]))
        versions = {name: version(name) for name in ("tensorflow", "keras", "numpy")}
        versions["python"] = platform.python_version()  # its sources are the text
        _FILE.write_text(json.dumps({"versions": versions, "tasks": summary}, indent=1) + "\n")
    print_tables(summary)
    draw(summary)
    return 0


if __name__ == "__main__":
    sys.exit(main())
