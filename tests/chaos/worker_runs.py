"""Runs `on_workers.py` and reads the results."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import worker_journal
from child_environment import child_environment
from training import EPOCHS, SAMPLES, STEPS, differences

SCRIPT = Path(__file__).with_name("on_workers.py")


def command(folder, kind, workers, *options, plan=(), epochs=EPOCHS):
    """Returns arguments and environment of a process that runs `on_workers.py` by `tfdist run`."""
    return launcher(workers, options, SCRIPT, folder, json.dumps(plan), kind, epochs)


def launcher(workers, options, script, *arguments):
    """Returns arguments and environment of a process that runs a script by `tfdist run`."""
    run = [sys.executable, "-m", "tfdist.launch", "run", "--workers", str(workers), *options]
    return [*run, str(script), *map(str, arguments)], child_environment()


def run(arguments, environ, *, plan=(), code=0, limit_seconds=1200):
    """Runs what `command` or `launcher` returned, and returns the launcher's output; every fault must occur."""
    ended = subprocess.run(arguments, env=environ, capture_output=True, text=True, timeout=limit_seconds, check=False)
    assert ended.returncode == code, ended.stderr[-6000:]
    assert ended.stdout.count("fault: ") == len(plan), f"Not every fault occurred.\n{ended.stdout}{ended.stderr}"
    return ended.stderr


def results(folder, workers):
    """Returns the result of `train` by rank."""
    return [dict(np.load(folder / f"result-{rank}.npz")) for rank in range(workers)]


def first_steps(folder):
    """Returns the number of the first step of each attempt, from 0, or None for an attempt without steps."""
    journals = sorted((folder / "journals" / "0").iterdir())
    attempts = [[event["step"] for event in worker_journal.read(path) if "step" in event] for path in journals]
    return [steps[0][0] * STEPS + steps[0][1] if steps else None for steps in attempts]


def counting_steps(folder, workers):
    """Returns, by rank, the steps that have led to the final weights, with the ids that the replicas saw.

    An attempt resumes after some step of the earlier ones, whose later steps are lost.
    """
    by_rank = []
    for rank in range(workers):
        counting = []
        for path in sorted((folder / "journals" / str(rank)).iterdir()):
            steps = [(event["step"], event["seen"]) for event in worker_journal.read(path) if "step" in event]
            if steps:
                counting = [one for one in counting if one[0] < steps[0][0]] + steps
        by_rank.append(counting)
    return by_rank


def assert_is_complete(steps, epochs=EPOCHS):
    """Checks that every rank has made every step, in order, and that together they saw each sample once per epoch."""
    expected = [[epoch, step] for epoch in range(epochs) for step in range(STEPS)]
    assert [[step for step, _ in counting] for counting in steps] == [expected] * len(steps)
    for epoch in range(epochs):
        seen = [seen for counting in steps for (of, _), seen in counting if of == epoch]
        assert sorted(number for one in seen for ids in one.values() for number in ids) == [*range(1, SAMPLES + 1)]


def assert_as_undisturbed(undisturbed, folder, workers, said):
    """Checks that a training ended like that in the folder `undisturbed`: the same bits, after the same steps."""
    for rank, pair in enumerate(zip(results(undisturbed, workers), results(folder, workers), strict=True)):
        assert differences(*pair) == [], f"rank {rank}\n{said[-3000:]}"
    assert counting_steps(folder, workers) == counting_steps(undisturbed, workers)
