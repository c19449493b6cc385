"""A training in stages on workers that are killed or frozen ends as the undisturbed one in one process, bit by bit."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import on_stages
import pytest
from child_environment import child_environment

pytestmark = [pytest.mark.multi_process, pytest.mark.timeout(1500)]

SCRIPT, LIMIT_SECONDS, POLL_SECONDS = Path(on_stages.__file__), 240.0, 0.02
TASKS = "chief", "worker 0", "worker 1"  # in the order in which they are started


class Run:
    """`tfdist run --chief --workers 2 on_stages.py FOLDER EPOCHS SECONDS`."""

    def __init__(self, folder, epochs, seconds, *options):
        folder.mkdir()
        self.folder, self.output = folder, folder / "output.txt"
        options = ["--chief", "--workers", "2", "--max-restarts", "1000", "--restart-delay", "0", *options]
        command = [sys.executable, "-m", "tfdist.launch", "run", *options, str(SCRIPT), str(folder)]
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [*command, str(epochs), str(seconds)],
                env=child_environment(SCRIPT.parent),
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def wait(self, condition):
        """Returns the first true value of `condition()`, or something false once the command has ended."""
        end = time.monotonic() + LIMIT_SECONDS
        while not (found := condition()) and self.process.poll() is None:
            assert time.monotonic() < end, self.output.read_text()[-6000:]
            time.sleep(POLL_SECONDS)
        return found

    def processes(self):
        """The process ids of the chief and the workers, once all have been started."""
        found = {}
        for pid in _children(self.process.pid):
            words = _words(pid)
            if words[1:2] == [str(SCRIPT)] or "tfdist.servers" in words:
                found[pid] = words
        chiefs = [pid for pid, words in found.items() if str(SCRIPT) in words]
        workers = sorted(pid for pid in found if pid not in chiefs)
        return dict(zip(TASKS, [*chiefs, *workers], strict=True)) if len(chiefs) == 1 and len(workers) == 2 else None

    def steps(self):
        try:
            return int((self.folder / "steps").read_text() or 0)
        except FileNotFoundError:
            return 0

    def strike(self, task, number, processes):
        """Sends a signal to one of the processes, and waits until the launcher has ended all of them."""
        os.kill(processes[task], number)
        self.wait(lambda: not set(_children(self.process.pid)) & set(processes.values()))

    def end(self):
        """Waits for the end, and returns the output."""
        code = self.process.wait(timeout=LIMIT_SECONDS)
        assert code == 0, self.output.read_text()[-6000:]
        return self.output.read_text()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait()


def _children(pid):
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def _words(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return []


def assert_as_undisturbed(folder, undisturbed):
    found = dict(np.load(folder / "state.npz"))
    assert found.keys() == undisturbed.keys()
    for name, expected in undisturbed.items():
        np.testing.assert_array_equal(found[name], expected, err_msg=name)


@pytest.mark.parametrize(
    ("task", "number", "cause"),
    [
        ("worker 1", signal.SIGKILL, "worker 1 failed first: killed by SIGKILL"),
        pytest.param("worker 0", signal.SIGSTOP, "worker 0 failed first: frozen: ", marks=pytest.mark.long),
        pytest.param("chief", signal.SIGKILL, "chief failed first: killed by SIGKILL", marks=pytest.mark.long),
    ],
)
def test_lost_process(cpus, tmp_path, task, number, cause):
    undisturbed = on_stages.trained(tmp_path, 12, 0.0, cpus[:2])
    with Run(tmp_path / "run", 12, 0.02, "--heartbeat-timeout", "3") as run:
        run.wait(lambda: run.steps() > on_stages.STEPS + 1)  # in the middle of an epoch, after a checkpoint
        run.strike(task, number, run.processes())
        said = run.end()
    assert_as_undisturbed(tmp_path / "run", undisturbed)
    assert cause in said and "restart 1 of 1000 at once with 2 workers" in said
    assert "training resumes after step " in said


@pytest.mark.long
def test_kills_at_random_moments(cpus, tmp_path):
    """Kills at any moment of the start, or within some steps beyond the last attempt's, so that the training ends."""
    kills, epochs, seed = 20, 60, int(os.environ.get("CHAOS_SEED", "3"))
    print(f"CHAOS_SEED={seed}")
    generator = random.Random(seed)
    undisturbed = on_stages.trained(tmp_path, epochs, 0.0, cpus[:2])
    struck = []
    with Run(tmp_path / "run", epochs, 0.05) as run:
        while len(struck) < kills and (processes := run.wait(run.processes)):
            is_at_start = bool(struck) and struck[-1][0] != "start" and generator.random() < 0.4
            if is_at_start:
                end = time.monotonic() + generator.uniform(0.0, 8.0)
                run.wait(lambda end=end: time.monotonic() > end)
            else:
                (run.folder / "steps").write_text("0")
                steps = generator.randint(on_stages.SAVED_EVERY, 3 * on_stages.SAVED_EVERY)
                run.wait(lambda steps=steps: run.steps() >= steps)
            task = generator.choice(TASKS)
            if run.process.poll() is None:
                run.strike(task, signal.SIGKILL, processes)
                struck.append(("start" if is_at_start else "steps", task))
        said = run.end()
    print(*struck, sep="\n")
    assert_as_undisturbed(tmp_path / "run", undisturbed)
    assert len(struck) == kills and said.count("failed first: killed by SIGKILL") == kills
