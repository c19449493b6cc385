"""Measures what the callbacks `WeightComparison` and `SpikeGuard` cost.

    python benchmarks/guards.py                5 minutes on two cores

Two workers train perceptrons with Adam, without a callback and with each of them, in turns within one process.
Times are lower quartiles, as other programs disturb the rest. *comparison* is that of one comparison of all weights and
slots; *with gradients* also computes 1 % of the rows of a device again, which is one row here. The ratios are medians,
of the processor time of a step to that of the same round without a callback.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
from elastic_run.worker import model_of

_ROOT = Path(__file__).parent
_BATCH, _WARM_UP_STEPS = 96, 10
_MODELS = {"20,000 parameters": (20_000, 300), "10 M parameters": (10_000_000, 50)}
_VARIANTS = ("no callback", "WeightComparison", "check_gradients", "SpikeGuard")


class StepTimes(keras.callbacks.Callback):
    """The times between ends of steps, after the warm-up: of the clock and of this process, in seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[tuple[float, float]] = []
        self._last = (0.0, 0.0)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Notes a step."""
        now = time.perf_counter(), time.process_time()
        if batch > _WARM_UP_STEPS:
            self.times.append((now[0] - self._last[0], now[1] - self._last[1]))
        self._last = now


def train(rounds: int, file: Path) -> None:
    """Trains on this worker; rank 0 writes lower quartiles in milliseconds, by model and round."""
    from tfdist.callbacks import SpikeGuard, WeightComparison
    from tfdist.strategies import MultiWorkerMirroredStrategy

    compared: dict[str, list[float]] = {name: [] for name in ("WeightComparison", "check_gradients")}

    class TimedComparison(WeightComparison):
        """Notes how long each comparison takes."""

        def __init__(self, name: str, **options: Any) -> None:
            super().__init__(20, **options)
            self._times = compared[name]

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            began, before = time.perf_counter(), self.comparisons
            super().on_train_batch_end(batch, logs)
            if self.comparisons > before:
                self._times.append(time.perf_counter() - began)

    makers = {
        "WeightComparison": lambda: [TimedComparison("WeightComparison")],
        "check_gradients": lambda: [TimedComparison("check_gradients", check_gradients=0.01)],
        "SpikeGuard": lambda: [SpikeGuard()],
    }
    strategy = MultiWorkerMirroredStrategy()
    results: dict[str, Any] = {}
    for name, (parameters, steps) in _MODELS.items():
        x = np.random.default_rng(0).normal(size=(_BATCH * steps, 32)).astype(np.float32)
        with strategy.scope():
            model = model_of(parameters)
            model.compile("adam", "mse")
        of_rounds = []
        for times_of_one in compared.values():
            times_of_one.clear()
        for number in range(rounds):
            quartiles = {}
            for variant in _VARIANTS[number % len(_VARIANTS) :] + _VARIANTS[: number % len(_VARIANTS)]:
                times = StepTimes()
                callbacks = [*makers.get(variant, list)(), times]
                model.fit(x, x[:, :1], batch_size=_BATCH, verbose=0, callbacks=callbacks)
                quartiles[variant] = [
                    1000 * statistics.quantiles(of_kind)[0] for of_kind in zip(*times.times, strict=True)
                ]
            of_rounds.append(quartiles)
        comparisons = {variant: 1000 * statistics.quantiles(found)[0] for variant, found in compared.items()}
        results[name] = {"rounds": of_rounds, "comparison_ms": comparisons}
    if strategy.rank == 0:
        file.write_text(json.dumps(results))


def report(results: dict[str, Any]) -> None:
    """Prints the results as a table."""
    variants = " | ".join(_VARIANTS[1:])
    print(f"\n| two workers, Adam | step | comparison | of 200 steps | with gradients | of 200 steps | {variants} |")
    print("|---" * (5 + len(_VARIANTS)) + "|")
    for name, result in results.items():
        step = statistics.median(of_round["no callback"][0] for of_round in result["rounds"])
        ratios = [
            statistics.median(of_round[variant][1] / of_round["no callback"][1] for of_round in result["rounds"])
            for variant in _VARIANTS[1:]
        ]
        times = [cell for ms in result["comparison_ms"].values() for cell in (f"{ms:.2f} ms", f"{ms / step / 2:.2f} %")]
        cells = [f"{step:.2f} ms", *times, *(f"{r:.3f}" for r in ratios)]
        print(f"| {name} | {' | '.join(cells)} |")


def main() -> None:
    """Starts the workers, and prints what they have measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--elastic", action="store_true", help="whether the training is elastic")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)  # writes its results there
    arguments = parser.parse_args()
    if arguments.worker is not None:
        return train(arguments.rounds, arguments.worker)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (_ROOT, _ROOT.parent)))}
    options = ["--elastic", "1"] if arguments.elastic else []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "results.json")
        command = [sys.executable, "-m", "tfdist.launch", "run", "--workers", "2", *options, str(Path(__file__))]
        done = subprocess.run(
            [*command, "--worker", str(file), "--rounds", str(arguments.rounds)],
            env={**environment, "TF_CPP_MIN_LOG_LEVEL": "3"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        return report(json.loads(file.read_text()))


if __name__ == "__main__":
    main()
