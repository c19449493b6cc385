"""Shows where the milliseconds of a step go: a table and a plot from TensorFlow's profiler.

    python benchmarks/step_profile.py                                  the MLP, three methods
    python benchmarks/step_profile.py --models text --methods dense int8 powersgd:4

Two workers train by `model.fit`, each on one core. Every instant of a step of the first one counts once: for the
operations that run, in equal parts; for the exchange, if none runs; for Python, outside of the step's function. The
thread that exchanges is not profiled: the operations that run beside it take longer. Writes `step_profile.json` and
`step_profile.png` to `benchmarks/results`.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2
from workloads import WORKLOADS, Workload

from tfdist.strategies import MultiWorkerMirroredStrategy

_RESULTS = Path(__file__).parent / "results"
_STEPS, _WARM_UP_STEPS = 20, 5
EXCHANGE, OTHER, PYTHON, DATA = "wait for the exchange", "other operations", "Python", "data"
FORWARD, BACKWARD, UPDATE, METRICS = "forward", "backward", "update", "metrics"
ENCODE, DECODE = "encode", "decode"
KINDS = (FORWARD, BACKWARD, ENCODE, EXCHANGE, DECODE, UPDATE, METRICS, DATA, OTHER, PYTHON)
_DECODING = frozenset("decode from_blocks sum_blocks unflatten encoding_error _finite _one_phase".split())
_CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall", "If", "StatelessIf"})
_ATTEMPTS = 8  # TensorFlow's profiler ends some processes by "double free or corruption"
_ASYNCHRONOUS = "ExecutorState::ProcessAsync::Start"
_STEP_FUNCTION = "multi_step_on_iterator"  # of Keras


class Interval(NamedTuple):
    """A kind of work from `start` to `end`, in milliseconds."""

    start: float
    end: float
    kind: str


class ObservedAdam(keras.optimizers.Adam):
    """Adam that remembers the graphs in which it updates."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.graphs: list[tf.Graph] = []

    def apply(self, *args: Any, **kwargs: Any) -> None:
        """Updates, as Keras does."""
        self.graphs.append(tf.compat.v1.get_default_graph())
        super().apply(*args, **kwargs)


def kind_of(operation: tf.Operation) -> str:
    """Returns the kind of work of an operation, by the source files that created it."""
    for frame in reversed(operation.traceback or ()):
        if frame.name in ("fused", "_fused", "_compiled"):
            continue  # the caller shows what XLA computes
        if "/tfdist/compression/" in frame.filename or "/tfdist/collectives/" in frame.filename:
            reduces_blocks = frame.filename.endswith("block_compressor.py") and frame.name == "reduce"
            return DECODE if frame.name in _DECODING or reduces_blocks else ENCODE
        if "/optimizers/" in frame.filename or "/tfdist/updates/" in frame.filename:
            return UPDATE
        if "/metrics/" in frame.filename or "metric_synchronization" in frame.filename:
            return METRICS
        if frame.filename.endswith("eager/backprop.py") and "gradient" in frame.name:
            return BACKWARD
    return FORWARD


def time_by_kind(work: Iterable[Interval], steps: Sequence[Interval]) -> Counter[str]:
    """Returns the milliseconds of each kind between the start of the first step's function and that of the last one.

    Args:
        work: Operations, in any order.
        steps: The runs of the step's function, in their order.

    >>> steps = [Interval(0, 8, "step"), Interval(10, 18, "step")]
    >>> work = [Interval(1, 3, "forward"), Interval(2, 4, "backward"), Interval(7, 8, "update")]
    >>> sorted(time_by_kind(work, steps).items())
    [('Python', 2.0), ('backward', 1.5), ('forward', 1.5), ('update', 1.0), ('wait for the exchange', 4.0)]
    """
    begin, end = steps[0].start, steps[-1].start
    marks = [Interval(step.start, step.end, PYTHON) for step in steps] + list(work)
    changes = sorted(
        (min(max(time, begin), end), delta, mark.kind)
        for mark in marks
        for time, delta in ((mark.start, 1), (mark.end, -1))
    )
    running: Counter[str] = Counter()
    total: Counter[str] = Counter()
    now = begin
    for time, delta, kind in changes:
        if time > now:
            for one, part in _share(running):
                total[one] += (time - now) * part
            now = time
        running[kind] += delta
    return total


def _share(running: Counter[str]) -> Iterator[tuple[str, float]]:
    busy = {kind: count for kind, count in running.items() if count > 0 and kind != PYTHON}
    if busy:
        yield from ((kind, count / sum(busy.values())) for kind, count in busy.items())
    elif running[PYTHON] <= 0:  # no step's function runs
        yield PYTHON, 1.0
    else:
        yield EXCHANGE, 1.0


def profile(workload: Workload, method: str | None, *, jit_compile: bool | str) -> dict[str, float]:
    """Trains with TensorFlow's profiler and returns the milliseconds of a step by kind."""
    strategy = MultiWorkerMirroredStrategy(compression=method)
    with strategy.scope():
        model, optimizer = workload.build(), ObservedAdam(1e-3)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=jit_compile)
    inputs, labels = workload.batch(strategy.rank)
    local = tf.data.Dataset.from_tensors((inputs, labels)).repeat()
    data = strategy.distribute_datasets_from_function(lambda context: local)
    model.fit(data, steps_per_epoch=_WARM_UP_STEPS, verbose=0)
    with tempfile.TemporaryDirectory() as folder:
        tf.profiler.experimental.start(folder)
        model.fit(data, steps_per_epoch=_STEPS, verbose=0)
        tf.profiler.experimental.stop()
        [file] = Path(folder).rglob("*.xplane.pb")
        space = xplane_pb2.XSpace.FromString(file.read_bytes())
    operations = [operation for graph in optimizer.graphs for operation in graph.get_operations()]
    kinds = {operation.name: kind_of(operation) for operation in operations if operation.type not in _CALLS}
    calls = {operation.name: kind_of(operation) for operation in operations if operation.type in _CALLS}
    [plane] = [plane for plane in space.planes if plane.name == "/host:CPU"]
    work, steps = [], []
    for line in plane.lines:
        for event in line.events:
            start = line.timestamp_ns / 1e6 + event.offset_ps / 1e9
            name = plane.event_metadata[event.metadata_id].name
            if name == _ASYNCHRONOUS:  # a function of XLA, which runs here; other functions start here only
                kind = _kind_by_name(_stat(plane, event, "name"), calls)
            else:
                kind = "step" if name == _STEP_FUNCTION else _kind_of_event(name, kinds)
            if kind is not None:
                (steps if kind == "step" else work).append(Interval(start, start + event.duration_ps / 1e9, kind))
    steps.sort()
    total = time_by_kind(work, steps)
    return {kind: total[kind] / (len(steps) - 1) for kind in KINDS}


def _stat(plane: Any, event: Any, name: str) -> str:
    """The text of a statistic of a profiler's event."""
    found = [stat for stat in event.stats if plane.stat_metadata[stat.metadata_id].name == name]
    return found[0].str_value or plane.stat_metadata[found[0].ref_value].name if found else ""


def _kind_of_event(name: str, kinds: dict[str, str]) -> str | None:
    """The kind of a profiler's event: that of the operation whose name ends the event's name; `None` if it is none."""
    path, colon, operation_type = name.rpartition(":")
    if name.startswith("IteratorGetNextOp"):
        return DATA
    if not colon or " " in name or "::" in name:
        return None
    if not operation_type[:1].isalpha() and operation_type[:1] != "_":
        return None
    if (found := _kind_by_name(path, kinds)) is not None:
        return found
    if operation_type in _CALLS:
        return None
    return UPDATE if "Assign" in operation_type or "Apply" in operation_type else OTHER


def _kind_by_name(path: str, kinds: dict[str, str]) -> str | None:
    """The kind of the operation whose name ends `path`, as TensorFlow adds the names of the calls around it."""
    parts = path.split("/")
    ends = ("/".join(parts[first:]) for first in range(len(parts)))
    return next((kinds[end] for end in ends if end in kinds), None)


def draw(results: dict[str, dict[str, float]], path: Path) -> None:
    """Draws a bar for each training, in parts."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 0.6 * len(results) + 1.6), layout="constrained")
    left = [0.0] * len(results)
    for number, kind in enumerate(KINDS):
        widths = [result[kind] for result in results.values()]
        axes.barh(list(results), widths, left=left, label=kind, color=pyplot.get_cmap("tab10")(number))
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("ms a step")
    axes.legend(ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    figure.savefig(path, dpi=120)


def work(model: str, method: str, *, jit_compile: bool, output: Path) -> None:
    """Profiles one training as a worker; the first one writes the result."""
    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    keras.utils.set_random_seed(1)
    compression = None if method == "dense" else method
    result = profile(WORKLOADS[model], compression, jit_compile=jit_compile or "auto")
    if rank == 0:
        output.write_text(json.dumps(result))


def main() -> None:
    """Launches the trainings one after another, prints the table, and writes JSON and plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(WORKLOADS), default=["mlp"])
    parser.add_argument("--methods", nargs="+", default=["dense", "int8", "powersgd:4"], help="dense or `compression=`")
    parser.add_argument("--jit_compile", action="store_true", help="compile layers, losses and updates by XLA")
    parser.add_argument("--output", type=Path, default=_RESULTS / "step_profile.json")
    chosen = parser.parse_args()
    if "TF_CONFIG" in os.environ:
        work(chosen.models[0], chosen.methods[0], jit_compile=chosen.jit_compile, output=chosen.output)
        return
    results: dict[str, dict[str, float]] = {}
    options = ["--jit_compile"] if chosen.jit_compile else []
    launcher = [sys.executable, "-m", "tfdist.launch", "run", "--workers", "2", "--max-restarts", str(_ATTEMPTS)]
    with tempfile.TemporaryDirectory() as folder:
        for model, method in itertools.product(chosen.models, chosen.methods):
            file = Path(folder) / "result.json"
            training = [__file__, "--models", model, "--methods", method, "--output", str(file), *options]
            subprocess.run([*launcher, *training], check=True, capture_output=True)
            results[f"{model}, {method}"] = json.loads(file.read_text())
    chosen.output.write_text(json.dumps(results, indent=1) + "\n")
    draw(results, chosen.output.with_suffix(".png"))
    print("| ms a step | all |", " | ".join(KINDS), "|")
    print("|---" * (len(KINDS) + 2) + "|")
    for name, result in results.items():
        print(f"| {name} | {sum(result.values()):.1f} |", " | ".join(f"{ms:.1f}" for ms in result.values()), "|")


if __name__ == "__main__":
    main()
