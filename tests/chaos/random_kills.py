"""Kills random workers of a `tfdist run` at random moments, from outside, until enough were killed."""

import collections
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import worker_journal
from training import STEPS
from worker_journal import SAVING
from worker_runs import SCRIPT, command

_LIMIT_SECONDS = 240  # for every wait
_POLL_SECONDS = 0.02
_SHORT_POLL_SECONDS = 0.001  # a save is over after some milliseconds
_START_SECONDS = 6.0
_AT_START = 0.4
_ANY, _STEPS = "any moment", "steps"
# What a kill waits for, each with the same probability. Short phases are rarely hit by chance.
_WAITS_AT_START = _ANY, "restore"
_WAITS_AFTER_STEPS = _ANY, _STEPS, "validation", "end of an epoch", SAVING
BETWEEN_EPOCHS, HALF_DONE = "between epochs", "with an accumulation half done"
_BETWEEN = "end of an epoch", "beginning of an epoch"


class RandomKills:
    """Runs `on_workers.py` in a folder until its training has finished, and kills workers.

    Of two kills in a row at least one waits until training has made progress, so that the training ends.

    A kill happens up to `_START_SECONDS` after the start of the workers, which is about when training begins; or up to
    `steps_seconds` after the first step beyond those of all earlier attempts; or less than a 20th of that after one of
    the next steps; or when the journal of the worker reports a phase chosen at random.

    Attributes:
      moments: the `Moment` of each worker that was killed, with its rank.
    """

    def __init__(self, folder, kind, workers, epochs, random, steps_seconds=2.0):
        self.moments = []
        self._folder, self._workers, self._random = folder, workers, random
        self._kind, self._epochs = kind, epochs
        self._journals = folder / "journals"
        self._steps_seconds = steps_seconds
        self._waits_for_steps, self._best = True, [-1, 0]
        folder.mkdir()

    def run(self, kills):
        """Trains to the end, which may happen before `kills` workers were killed; returns the output."""
        code, text = self._run_command(kills)
        failed = text.count("failed: killed by SIGKILL (possibly the OOM killer")
        assert failed == len(self.moments), f"{failed} of {self.moments} were noticed:\n{text}"
        assert code == 0, text[-6000:]
        return text

    def _run_command(self, kills):
        options = ["--max-restarts", "1000", "--restart-delay", "0"]
        arguments, environ = command(self._folder, self._kind, self._workers, *options, epochs=self._epochs)
        with open(self._folder / "output", "w+") as output:
            run = subprocess.Popen(arguments, env=environ, stdout=output, stderr=subprocess.STDOUT)
            try:
                while len(self.moments) < kills and self._strike(run):
                    pass
                code = run.wait(timeout=_LIMIT_SECONDS)
            finally:
                if run.poll() is None:
                    run.terminate()
                    run.wait()
            output.seek(0)
            return code, output.read()

    def _strike(self, run):
        """Kills one worker of the next attempt; returns False if there was none."""
        best = self._best = max([self._best, *self._steps()])
        workers = self._wait(run, lambda: (found := _workers_of(run.pid)) and len(found) == self._workers and found)
        if not workers:
            return False
        at_start = not self._waits_for_steps and self._random.random() < _AT_START
        rank = self._random.randrange(self._workers)
        pid = workers[rank]
        delay = self._random.uniform(0, _START_SECONDS if at_start else self._steps_seconds)
        what = self._random.choice(_WAITS_AT_START if at_start else _WAITS_AFTER_STEPS)
        if what == _STEPS:
            best = [best[0], best[1] + self._random.randrange(9)]
        if not at_start:
            self._wait(run, lambda: max([best, *self._steps()]) > best)
        if what not in (_ANY, _STEPS):
            self._wait(run, lambda: what in self._now(rank, pid) or not _is_alive(pid), _SHORT_POLL_SECONDS)
        delay *= {_ANY: 1.0, _STEPS: 0.05, "validation": 0.05}.get(what, 0.0)  # the other phases are short
        end = time.monotonic() + delay
        self._wait(run, lambda: time.monotonic() > end)
        if not _is_alive(pid):
            return run.poll() is None  # it has exited; another attempt, or the end, follows
        os.kill(pid, signal.SIGKILL)
        self._wait(run, lambda: not _is_alive(pid))
        self.moments.append((rank, self._moment(rank, pid)))
        self._waits_for_steps = at_start
        self._wait(run, lambda: not set(_workers_of(run.pid).values()) & set(workers.values()))
        return True

    def _wait(self, run, condition, poll_seconds=_POLL_SECONDS):
        """Waits until `condition()` is true and returns it; or something false once the command has ended."""
        end = time.monotonic() + _LIMIT_SECONDS
        while not (found := condition()):
            if run.poll() is not None:
                return None
            assert time.monotonic() < end, (self._folder / "output").read_text()[-6000:]
            time.sleep(poll_seconds)
        return found

    def _steps(self):
        """The steps of the chief's newest attempt."""
        newest = sorted((self._journals / "0").glob("*.jsonl"))[-1:]
        return [event["step"] for path in newest for event in worker_journal.read(path) if "step" in event]

    def _moment(self, rank, pid):
        found = list((self._journals / str(rank)).glob(f"*-pid-{pid}.jsonl"))
        return worker_journal.last_moment(worker_journal.read(found[0]) if found else [])

    def _now(self, rank, pid):
        moment = self._moment(rank, pid)
        return moment.phase, moment.meanwhile


def count_moments(moments):
    """Counts `RandomKills.moments` by phase, and by what happened at the same time."""
    moments = [moment for _, moment in moments]
    counts = collections.Counter(moment.phase for moment in moments)
    counts[BETWEEN_EPOCHS] = sum(moment.step is not None and moment.phase in _BETWEEN for moment in moments)
    counts[SAVING] = sum(moment.meanwhile == SAVING for moment in moments)
    # An update has two micro-steps: after an odd number of steps it is half done.
    counts[HALF_DONE] = sum(
        moment.step is not None and (moment.step[0] * STEPS + moment.step[1] + 1) % 2 for moment in moments
    )
    return +counts


def _workers_of(launcher):
    """The process ids of the workers that a launcher runs, by rank."""
    found = {}
    for pid in _descendants(launcher):
        try:
            if str(SCRIPT).encode() not in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                continue
            pairs = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        environ = dict(pair.split(b"=", 1) for pair in pairs if b"=" in pair)
        if b"TFDIST_ATTEMPT" in environ:
            found[json.loads(environ[b"TF_CONFIG"])["task"]["index"]] = pid
    return found


def _descendants(pid):
    try:
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return [*children, *(other for child in children for other in _descendants(child))]


def _is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in b"ZX"
    except OSError:
        return False
