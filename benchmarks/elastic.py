"""Measures elastic training: what it costs without faults, and what losses and joins of workers cost.

    python benchmarks/elastic.py                   all parts: 15 minutes on two cores
    python benchmarks/elastic.py --parts cost      steps with and without `--elastic`, in turns; two workers
    python benchmarks/elastic.py --parts faults    three workers, of which one after the other is killed and joins again
    python benchmarks/elastic.py --parts random --minutes 30    kills and stops at random, and what they change
    python benchmarks/elastic.py --parts torchft --torch-python PATH    the same faults with torchft
    python benchmarks/elastic.py --from-json       prints and draws the last results again

*cost*: the median time from the end of a step to the end of the next, in runs that alternate; of a model of 10 M
parameters, and of one with which a step takes 5 ms on this machine without `--elastic`.

*faults*: the time from a kill to the end of the next step of the others, beyond a usual step; from the moment in which
a new process is ready to its first step with rows; the slowest step of the others meanwhile; and the part of the run
in which steps were made that count, beside the same faults under `tfdist run --max-restarts` with
`FailureRecovery`, which saves every ten steps.

*torchft*, only if asked for: the first two of these times, and the part of the run, with the same model, the same kills
and gloo. A Python that has torch and torchft (`pip install torch torchft numpy`) is the one that runs this file, or
that of `--torch-python`.

*random*, only if asked for: three workers, of which one is killed, or stopped for 15 s, every 15 to 35 s, with a
limit of silence of 3 s. Weights at the end beside those of one process, and what the faults have cost.

Writes `elastic.json` and `elastic.png` to `benchmarks/results`.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from elastic_run.worker import _MILLION
from network_run.machine import machine_info

_ROOT = Path(__file__).parent
_FILE = _ROOT / "results" / "elastic.json"
_WORKER = _ROOT / "elastic_run" / "worker.py"
_TORCHFT_WORKER = _ROOT / "elastic_run" / "torchft_worker.py"
_WARM_UP_STEPS = 10
_SHORT_STEP_MS, _LEAST_PARAMETERS, _MOST_SEARCHES = 5.0, 1000, 8
_TOLERANCE = 0.05  # of the length of short steps
_SECONDS_BETWEEN_FAULTS, _STOPPED_SECONDS = (15.0, 35.0), 15.0
_STANDS_STILL_SECONDS = 2.0
_SECONDS_OF_RANDOM_STEP, _STEPS_WITHOUT_FAULTS = 0.075, 200  # about; at the end
_ELASTIC, _RESTARTS = "elastic", "restarts"

Event = tuple[str, int, int, list[int], float]  # kind, rank, step, ranks that train, time in seconds since 1970


@dataclasses.dataclass
class Run:
    """What a training has left: events in the order of time, the output of the launcher, and weights by rank."""

    events: list[Event]
    output: str
    weights: dict[int, list[np.ndarray]]


def run(workers: int, options: list[str], disturb: Callable[[Path, Any], None] | None = None, **training: Any) -> Run:
    """Runs a training. Meanwhile `disturb` gets its folder and process, if given."""
    settings = {"kills": [], "pause_seconds": 0.0, "saves_every": 0, "optimizer": "adam", **training}
    paths = os.pathsep.join(map(str, (_ROOT, _ROOT.parent)))
    environment = {**os.environ, "PYTHONPATH": paths, "TF_CPP_MIN_LOG_LEVEL": "3"}
    environment |= {} if disturb is None else {"TFDIST_SILENCE_LIMIT": "3"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, "-m", "tfdist.launch", "run", "--workers", str(workers), *options]
        command += [str(_WORKER), name, json.dumps(settings)]
        with (folder / "output").open("w+") as output:
            process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
            if disturb is not None:
                disturb(folder, process)
            process.wait()
            output.seek(0)
            said = output.read()
        if process.returncode:
            raise SystemExit(said)
        events = [json.loads(line) for file in folder.glob("*.jsonl") for line in file.read_text().splitlines()]
        weights = {
            int(file.stem.rpartition("-")[2]): list(np.load(file).values()) for file in folder.glob("weights-*.npz")
        }
    return Run(sorted(events, key=lambda event: event[4]), said, weights)


def step_times(events: list[Event], rank: int) -> list[float]:
    """Returns the times between ends of steps of a rank, in seconds, after the warm-up."""
    ends = [event[4] for event in events if event[0] == "step" and event[1] == rank]
    return [later - earlier for earlier, later in zip(ends[_WARM_UP_STEPS:], ends[_WARM_UP_STEPS + 1 :], strict=False)]


def median_step_ms(options: list[str], **training: Any) -> float:
    """Returns the median step time of two workers, in milliseconds."""
    return 1000 * statistics.median(step_times(run(2, options, **training).events, 0))


def parameters_of_step(milliseconds: float) -> int:
    """Returns with how many parameters a step of two workers takes about so long on this machine.

    If a step of the smallest model takes longer, that is the answer.
    """
    low, high = _LEAST_PARAMETERS, 10 * _MILLION
    for _ in range(_MOST_SEARCHES):
        parameters = round((low * high) ** 0.5)
        found = median_step_ms([], parameters=parameters, steps=300)
        print(f"  {parameters:,} parameters: {found:.2f} ms", file=sys.stderr, flush=True)
        if abs(found / milliseconds - 1) < _TOLERANCE:
            break
        low, high = (low, parameters) if found > milliseconds else (parameters, high)
    return parameters


def measure_cost(rounds: int) -> dict[str, Any]:
    """Returns the median step times without and with `--elastic`, by model and round, in milliseconds."""
    short = parameters_of_step(_SHORT_STEP_MS)
    costs = {"10 M parameters": (10 * _MILLION, 60), f"steps of 5 ms, {short:,} parameters": (short, 1000)}
    results: dict[str, Any] = {}
    for name, (parameters, steps) in costs.items():
        pairs: list[list[float]] = []
        for number in range(rounds):
            pair = {}
            # In turns: the machine may become slower or faster meanwhile.
            for is_elastic in (bool(number % 2), not number % 2):
                options = ["--elastic", "1"] if is_elastic else []
                pair[is_elastic] = median_step_ms(options, parameters=parameters, steps=steps)
            pairs.append([pair[False], pair[True]])
            print(f"  {name}: {pairs[-1][0]:.2f} ms, elastic {pairs[-1][1]:.2f} ms", file=sys.stderr, flush=True)
        results[name] = pairs
    return results


def faults_of(kills: int, parameters: int, pause_seconds: float) -> dict[str, Any]:
    """Returns the options of a training of three workers, of which one after the other is killed."""
    spacing = round(9 / pause_seconds)  # a new process needs some seconds to start
    faults = [[20 + number * spacing, number % 3] for number in range(kills)]
    training = {"parameters": parameters, "steps": 20 + kills * spacing, "kills": faults}
    return {**training, "pause_seconds": pause_seconds}


def cost_of_faults(events: list[Event], parameters: int) -> dict[str, Any]:
    """Returns what the kills of a training with three workers have cost."""
    usual = statistics.median(step_times(events, 1) + step_times(events, 2))
    pauses, joins, slowest = [], [], []
    for kill in (event for event in events if event[0] == "kill"):
        later = [event for event in events if event[0] == "step" and event[1] != kill[1] and event[2] > kill[2]]
        pauses.append(later[0][4] - kill[4] - usual)
        of_rank = [event for event in events if event[1] == kill[1] and event[4] > kill[4]]
        ready = next((event[4] for event in of_rank if event[0] == "ready"), None)
        first = next((event[4] for event in of_rank if event[0] == "step" and event[3]), None)
        if ready is not None and first is not None:
            joins.append(first - ready)
            ends = [e[4] for e in events if e[0] == "step" and e[1] == (kill[1] + 1) % 3 and ready < e[4] < first + 1]
            slowest.append(max(later - earlier for earlier, later in zip(ends, ends[1:], strict=False)))
    return {
        "parameters": parameters,
        "usual_step_ms": 1000 * usual,
        "pauses_ms": [1000 * pause for pause in pauses],
        "joins_ms": [1000 * join for join in joins],
        "slowest_steps_ms": [1000 * step for step in slowest],
    }


def measure_faults(kills: int, parameters: int, pause_seconds: float) -> dict[str, Any]:
    """Returns what faults have cost in an elastic run, and the events of both runs."""
    training = faults_of(kills, parameters, pause_seconds)
    of_elastic = run(3, ["--elastic", "1"], **training)
    elastic, output = of_elastic.events, of_elastic.output
    restarts = run(3, ["--max-restarts", str(kills)], saves_every=10, **training).events
    cost = cost_of_faults(elastic, parameters)
    usual = cost["usual_step_ms"] / 1000
    return {
        **cost,
        "launcher": output.strip().splitlines()[-1],
        "goodput": {_ELASTIC: goodput(elastic, usual), _RESTARTS: goodput(restarts, usual)},
        "curves": {_ELASTIC: _drawn(curve(elastic)), _RESTARTS: _drawn(curve(restarts))},
        "kills": [event[4] - elastic[0][4] for event in elastic if event[0] == "kill"],
    }


def measure_torchft(python: str, kills: int, parameters: int, pause_seconds: float) -> dict[str, Any]:
    """Returns what the same faults cost with torchft. Its lighthouse counts a silent worker as lost after 1 s."""
    training = faults_of(kills, parameters, pause_seconds)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    lighthouse = [str(Path(python).with_name("torchft_lighthouse")), "--min_replicas", "1"]
    lighthouse += ["--bind", f"127.0.0.1:{port}", "--heartbeat_timeout_ms", "1000", "--join_timeout_ms", "1000"]
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as ends:
        output = ends.enter_context((Path(name) / "output").open("w+"))

        def start(command: list[str], **variables: str) -> subprocess.Popen[bytes]:
            environment = {**os.environ, **variables, "RUST_LOG": "error"}
            process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
            ends.callback(process.wait)
            ends.callback(process.kill)
            return process

        def start_worker(rank: int) -> subprocess.Popen[bytes]:
            command = [python, str(_TORCHFT_WORKER), name, json.dumps(training)]
            address = f"http://127.0.0.1:{port}"
            return start(command, TFDIST_BENCHMARK_RANK=str(rank), TORCHFT_LIGHTHOUSE=address)

        start(lighthouse)
        workers = {rank: start_worker(rank) for rank in range(3)}
        while workers:
            time.sleep(0.01)
            for rank, worker in list(workers.items()):
                if worker.poll() == -signal.SIGKILL:
                    workers[rank] = start_worker(rank)
                elif worker.poll() == 0:
                    del workers[rank]
                elif worker.poll() is not None:
                    output.seek(0)
                    raise SystemExit(output.read())
        events = [json.loads(line) for file in Path(name).glob("*.jsonl") for line in file.read_text().splitlines()]
    events.sort(key=lambda event: event[4])
    cost = cost_of_faults(events, parameters)
    return {**cost, "goodput": {"torchft": goodput(events, cost["usual_step_ms"] / 1000)}}


def measure_random(minutes: float, seed: int) -> dict[str, Any]:
    """Returns what faults at random have cost, and the largest difference of a weight to those of one process."""
    choose, faults = random.Random(seed), []

    def disturb(folder: Path, process: Any) -> None:
        while process.poll() is None:
            time.sleep(choose.uniform(*_SECONDS_BETWEEN_FAULTS))
            step, living, at = _last_step(folder)
            if step > steps - _STEPS_WITHOUT_FAULTS:
                return  # a worker that is lost when another one has ended with 0 fails the run
            if len(living) < 2 or time.time() > at + _STANDS_STILL_SECONDS:
                continue  # somebody has to be left
            victim, kind = choose.choice(living), choose.choice(["kill", "kill", "stop"])
            pid = int((folder / f"pid-{victim}").read_text())
            faults.append([kind, victim, time.time()])
            os.kill(pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
            if kind == "stop":
                time.sleep(_STOPPED_SECONDS)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    steps = round(minutes * 60 / _SECONDS_OF_RANDOM_STEP / 1000) * 1000
    training = {"parameters": _MILLION, "steps": steps, "optimizer": "sgd"}
    elastic = run(3, ["--elastic", "1"], disturb, pause_seconds=0.05, **training)
    one = run(1, [], **training).weights[0]
    times = [event for event in elastic.events if event[0] == "step"]
    pauses: dict[str, list[float]] = {"kill": [], "stop": []}
    usual = statistics.median(step_times(elastic.events, 0))
    for kind, victim, at in faults:
        of_others = [event for event in times if event[1] != victim]
        last = max(event[2] for event in of_others if event[4] <= at)
        later = next((event[4] for event in of_others if event[2] > last), None)
        if later is not None:
            pauses[kind].append(later - at - usual)
    differences = [
        max(float(np.abs(own - theirs).max()) for own, theirs in zip(weights, one, strict=True))
        for weights in elastic.weights.values()
    ]
    return {
        "steps": steps,
        "faults": {kind: sum(fault[0] == kind for fault in faults) for kind in pauses},
        "pauses_ms": {kind: [1000 * pause for pause in of_kind] for kind, of_kind in pauses.items()},
        "goodput": goodput(elastic.events, usual),
        "largest_difference": max(differences),
        "largest_weight": max(float(np.abs(weight).max()) for weight in one),
        "seconds": times[-1][4] - times[0][4],
        "launcher": elastic.output.strip().splitlines()[-1],
    }


def _last_step(folder: Path) -> tuple[int, list[int], float]:
    """Returns the last step that was made, the ranks that trained then, and the time."""
    last = [json.loads(lines[-1]) for file in folder.glob("*.jsonl") if (lines := file.read_text().splitlines())]
    steps = [event for event in last if event[0] == "step"]
    last_event = max(steps, key=lambda event: event[4], default=("step", 0, 0, [], 0.0))
    return last_event[2], last_event[3], last_event[4]


def curve(events: list[Event]) -> list[list[float]]:
    """Returns when a step was first made, in seconds since the first event."""
    first: dict[int, float] = {}
    for kind, _, step, _, at in events:
        if kind == "step":
            first.setdefault(step, at - events[0][4])
    return [[at, step] for step, at in sorted(first.items())]


def _drawn(points: list[list[float]]) -> list[list[float]]:
    return [[round(at, 2), step] for at, step in points[::10]]


def goodput(events: list[Event], usual: float) -> float:
    """Returns which part of the time from the first to the last step the steps would have taken without faults."""
    points = curve(events)
    return (len(points) - 1) * usual / (points[-1][0] - points[0][0])


def report_faults(library: str, faults: dict[str, Any]) -> None:
    """Prints what kills have cost, as a table."""
    usual = f"a usual step {faults['usual_step_ms']:.0f} ms"
    print(f"\n{library}, three workers, {faults['parameters']:,} parameters, {usual}")
    print("\n| | median | largest | number |\n|---|---|---|---|")
    names = {"pauses_ms": "kill to the next step", "joins_ms": "ready to first rows"}
    for key, name in {**names, "slowest_steps_ms": "slowest step of the others during a join"}.items():
        values = faults[key]
        print(f"| {name} | {statistics.median(values):.0f} ms | {max(values):.0f} ms | {len(values)} |")


def report(results: dict[str, Any]) -> None:
    """Prints the results as tables."""
    if "cost" in results:
        print("\n| two workers | step | elastic | ratio, median of rounds |\n|---|---|---|---|")
        for name, pairs in results["cost"].items():
            plain, elastic = (statistics.median(column) for column in zip(*pairs, strict=True))
            ratio = statistics.median(pair[1] / pair[0] for pair in pairs)
            print(f"| {name} | {plain:.2f} ms | {elastic:.2f} ms | {ratio:.3f} |")
    for faults in results.get("faults", []):
        report_faults("tfdist", faults)
        shares = faults["goodput"]
        print(f"\nGoodput {shares[_ELASTIC]:.1%}; with restarts {shares[_RESTARTS]:.1%}. {faults['launcher']}")
    for faults in results.get("torchft", []):
        report_faults("torchft", faults)
        print(f"\nGoodput {faults['goodput']['torchft']:.1%}")
    if "random" in results:
        found = results["random"]
        print(f"\n{found['steps']} steps in {found['seconds'] / 60:.1f} minutes, faults {found['faults']}")
        for kind, pauses in found["pauses_ms"].items():
            if pauses:
                print(f"{kind} to the next step: median {statistics.median(pauses):.0f} ms, at most {max(pauses):.0f}")
        print(
            f"Goodput {found['goodput']:.1%}; largest difference to one process {found['largest_difference']:.1e}, of "
            f"weights up to {found['largest_weight']:.2f}. {found['launcher']}"
        )


def draw(results: dict[str, Any]) -> None:
    """Draws steps over time."""
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    faults = results["faults"][0]
    for name, points in faults["curves"].items():
        axes.plot(*zip(*points, strict=True), label=name)
    for number, at in enumerate(faults["kills"]):
        axes.axvline(at, color="grey", linewidth=0.8, linestyle=":", label=None if number else "a worker is killed")
    axes.set(xlabel="seconds", ylabel="steps", title="The same faults with and without restarts")
    axes.legend()
    figure.savefig(_FILE.with_suffix(".png"), dpi=120)


def main() -> None:
    """Measures, or reads the last results, and prints them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--parts", nargs="+", choices=["cost", "faults", "random", "torchft"], default=["cost", "faults"]
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--minutes", type=float, default=30.0, help="of the part random")
    parser.add_argument("--seed", type=int, default=0, help="of the part random")
    parser.add_argument("--torch-python", default=sys.executable, help="for the part torchft")
    parser.add_argument("--from-json", action="store_true")
    arguments = parser.parse_args()
    results = json.loads(_FILE.read_text()) if _FILE.exists() else {}
    if not arguments.from_json:
        results.setdefault("machines", {}).update(dict.fromkeys(arguments.parts, machine_info()))
        if "cost" in arguments.parts:
            results["cost"] = measure_cost(arguments.rounds)
        if "faults" in arguments.parts:
            results["faults"] = [
                measure_faults(arguments.kills, _MILLION, 0.05),
                measure_faults(2, 10 * _MILLION, 0.05),
            ]
        if "torchft" in arguments.parts:
            results["torchft"] = [
                measure_torchft(arguments.torch_python, arguments.kills, _MILLION, 0.05),
                measure_torchft(arguments.torch_python, 2, 10 * _MILLION, 0.05),
            ]
        if "random" in arguments.parts:
            results["random"] = measure_random(arguments.minutes, arguments.seed)
        _FILE.write_text(f"{json.dumps(results, indent=1)}\n")
    report(results)
    if "faults" in results:
        draw(results)


if __name__ == "__main__":
    main()
