"""Measures load balancing on workers of different speeds: step time, shares, and time against loss.

    python benchmarks/uneven.py
    python benchmarks/uneven.py --model mlp

Control groups limit each worker to a part of a core (`cpu.cfs_quota_us` of cgroup v1, with a period of 10 ms). Two
models train in the same processes and take turns: one with even shares, one with `load_balancing=True`. Needs root on
Linux with cgroup v1. Prints a table and writes `benchmarks/results/uneven.json` and `uneven.png`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from network_run.machine import machine_info

_RESULTS = Path(__file__).parent / "results"
_BATCH_SIZES = {"cnn": 120, "mlp": 2048}  # about 80 ms of a core
_WORKER = Path(__file__).parent / "uneven_worker.py"
_CGROUPS = Path("/sys/fs/cgroup/cpu")
_PERIOD_MICROSECONDS = 10_000
# Name, cores of each worker, and how many times faster steps must be than with even shares.
_FIRST_STEPS = 60  # until rows are divided by measured speeds
SCENARIOS = {
    "2 equal workers": ((1.0, 1.0), 0.97),
    "2 workers, one with half a core": ((1.0, 0.5), 1.25),
    "3 workers with 0.8, 0.8 and 0.2 cores": ((0.8, 0.8, 0.2), 2.0),
}


def main() -> None:
    """Measures, prints and draws."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--scenarios", nargs="+", choices=tuple(SCENARIOS), default=tuple(SCENARIOS))
    parser.add_argument("--model", choices=tuple(_BATCH_SIZES), default="cnn")
    parser.add_argument("--steps", type=int, default=100, help="steps of a turn")
    parser.add_argument("--turns", type=int, default=4, help="turns of each model; the first one is not counted")
    parser.add_argument("--batch-size", type=int, help="rows of a global batch; by default about 80 ms of a core")
    parser.add_argument("--results", type=Path, help="by default `results/uneven.json`, or `uneven_mlp.json`")
    arguments = parser.parse_args()
    batch_size = arguments.batch_size or _BATCH_SIZES[arguments.model]
    if arguments.results is None:
        arguments.results = _RESULTS / ("uneven.json" if arguments.model == "cnn" else f"uneven_{arguments.model}.json")
    results: dict[str, Any] = {"scenarios": {}}
    if arguments.results.exists():  # of other scenarios
        results = json.loads(arguments.results.read_text())
    results["machine"] = machine_info()
    for name in arguments.scenarios:
        cores, required = SCENARIOS[name]
        measured = _measure(cores, arguments.steps, arguments.turns, batch_size, arguments.model)
        results["scenarios"][name] = {
            "cores": cores,
            "model": arguments.model,
            "batch_size": batch_size,
            "steps": arguments.steps * arguments.turns,
            "required": required,
            **measured,
        }
        arguments.results.parent.mkdir(exist_ok=True)
        arguments.results.write_text(json.dumps(results, indent=1) + "\n")
    print("| workers | even, ms | balanced, ms | times faster | required | shares | from the speeds |")
    print("|---|---|---|---|---|---|---|")
    results["scenarios"] = {name: results["scenarios"][name] for name in SCENARIOS if name in results["scenarios"]}
    for name in arguments.scenarios:
        one = results["scenarios"][name]
        even, balanced = one["even"]["mean_ms"], one["balanced"]["mean_ms"]
        shares = " : ".join(f"{100 * share:.0f} %" for share in one["shares"])
        found = f"{even:.1f} | {balanced:.1f} | {even / balanced:.2f} | {one['required']} | {shares}"
        print(f"| {name} | {found} | {_farthest(one['divisions'], one['cores']):.3f} |")
    _draw(results, arguments.results.with_suffix(".png"))


def _farthest(divisions: list[tuple[int, list[float]]], cores: Sequence[float]) -> float:
    """Returns how far a share has been from its worker's part of the cores, at most, after the first steps."""
    speeds = [one / sum(cores) for one in cores]
    ends = [step for step, _ in divisions[1:]] + [_FIRST_STEPS + 1]
    late = [shares for end, (_, shares) in zip(ends, divisions, strict=True) if end > _FIRST_STEPS]
    return max(abs(a - b) for shares in late for a, b in zip(shares, speeds, strict=True))


def _measure(cores: tuple[float, ...], steps: int, turns: int, batch_size: int, model: str) -> dict[str, Any]:
    """Runs the workers of a scenario; returns what the chief has measured."""
    groups = [_CGROUPS / f"tfdist-uneven-{os.getpid()}-{rank}" for rank in range(len(cores))]
    try:
        for group, limit in zip(groups, cores, strict=True):
            group.mkdir()
            (group / "cpu.cfs_period_us").write_text(str(_PERIOD_MICROSECONDS))
            (group / "cpu.cfs_quota_us").write_text(str(int(limit * _PERIOD_MICROSECONDS)))
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "measured.json"
            command = [sys.executable, "-m", "tfdist.launch", "run", "--workers", str(len(cores)), str(_WORKER)]
            command += [str(output), str(steps), str(turns), str(batch_size), model, *map(str, groups)]
            subprocess.run(command, check=True, timeout=900)
            return dict(json.loads(output.read_text()))
    finally:
        for group in groups:
            if group.exists():
                group.rmdir()


def _draw(results: dict[str, Any], path: Path) -> None:
    """Draws time against loss, one panel for each scenario."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = results["scenarios"]
    figure, panels = pyplot.subplots(
        1, len(shown), figsize=(4.4 * len(shown), 3.8), squeeze=False, layout="constrained"
    )
    for panel, (name, one) in zip(panels[0], shown.items(), strict=True):
        for variant, color, label in (("even", "#8c8c8c", "even shares"), ("balanced", "#0b4fa3", "load balancing")):
            panel.plot(one[variant]["seconds"], one[variant]["losses"], color=color, label=label, linewidth=1.8)
        panel.set_title(name, fontsize=10, loc="left")
        panel.set_xlabel("seconds of training")
        panel.set_yscale("log")
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("loss")
    panels[0][0].legend(frameon=False)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
