"""Trainings in stages on the workers of `tfdist run --chief`, whose processes are killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from child_environment import child_environment

LIMIT_SECONDS, POLL_SECONDS = 240.0, 0.02


class Run:
    """`tfdist run --chief --workers N SCRIPT FOLDER EPOCHS SECONDS`.

    Attributes:
        tasks: The names of the processes, in the order in which they are started.
    """

    def __init__(self, script, workers, folder, epochs, seconds, *options):
        folder.mkdir()
        self.folder, self.output = folder, folder / "output.txt"
        self.tasks, self._script = ["chief", *(f"worker {rank}" for rank in range(workers))], script
        options = ["--chief", "--workers", str(workers), "--max-restarts", "1000", "--restart-delay", "0", *options]
        command = [sys.executable, "-m", "tfdist.launch", "run", *options, str(script), str(folder)]
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [*command, str(epochs), str(seconds)],
                env=child_environment(script.parent),
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
            if words[1:2] == [str(self._script)] or "tfdist.servers" in words:
                found[pid] = words
        chiefs = [pid for pid, words in found.items() if str(self._script) in words]
        pids = [*chiefs, *sorted(pid for pid in found if pid not in chiefs)]
        return dict(zip(self.tasks, pids, strict=True)) if len(chiefs) == 1 and len(pids) == len(self.tasks) else None

    def steps(self):
        try:
            return int((self.folder / "steps").read_text() or 0)
        except FileNotFoundError:
            return 0

    def strike(self, task, number, processes):
        """Sends a signal to one of the processes, and waits until the launcher has ended all of them."""
        os.kill(processes[task], number)
        self.wait(lambda: not set(_children(self.process.pid)) & set(processes.values()))

    def strike_randomly(self, kills, generator, saved_every):
        """Kills processes at any moment of the start, or within some steps beyond the last attempt's.

        So the training ends.

        Args:
            kills: How many.
            generator: Chooses moments and processes.
            saved_every: The number of steps between two checkpoints.

        Returns:
            For each kill "start" or "steps", and the name of the process.
        """
        struck = []
        while len(struck) < kills and (processes := self.wait(self.processes)):
            is_at_start = bool(struck) and struck[-1][0] != "start" and generator.random() < 0.4
            if is_at_start:
                end = time.monotonic() + generator.uniform(0.0, 8.0)
                self.wait(lambda end=end: time.monotonic() > end)
            else:
                (self.folder / "steps").write_text("0")
                steps = generator.randint(saved_every, 3 * saved_every)
                self.wait(lambda steps=steps: self.steps() >= steps)
            task = generator.choice(self.tasks)
            if self.process.poll() is None:
                self.strike(task, signal.SIGKILL, processes)
                struck.append(("start" if is_at_start else "steps", task))
        return struck

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
    except OSError:
        return []


def _words(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except OSError:
        return []


def assert_as_undisturbed(folder, undisturbed):
    found = dict(np.load(folder / "state.npz"))
    assert found.keys() == undisturbed.keys()
    for name, expected in undisturbed.items():
        np.testing.assert_array_equal(found[name], expected, err_msg=name)
