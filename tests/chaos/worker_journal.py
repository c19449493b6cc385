"""A log of a worker that may be killed at any moment: its phase, and which samples each step saw."""

import dataclasses
import json
import os
import time

SAVING = "while a save was written"


class Journal:
    """A file of this process in `folder` with one line of JSON per event, written at once.

    Its name begins with the time of the start, so that the attempts are in order.
    """

    def __init__(self, folder):
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{time.time_ns()}-pid-{os.getpid()}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, **event):
        os.write(self._file, (json.dumps(event) + "\n").encode())

    def phase(self, name):
        """Records what this process does from now on."""
        self.write(phase=name)

    def watch(self, owner, name, what):
        """Records from now on when `owner.name` begins and ends, which may be in another thread."""
        original = getattr(owner, name)

        def watched(*args, **kwargs):
            self.write(begins=what)
            result = original(*args, **kwargs)
            self.write(ends=what)
            return result

        setattr(owner, name, watched)


def read(path):
    """The events of a journal. An incomplete last line of a killed process is dropped."""
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


@dataclasses.dataclass(frozen=True)
class Moment:
    """What a process was doing.

    Attributes:
      phase: of the script or of `fit`.
      step: the last completed step, as epoch and number in the epoch; or None.
      meanwhile: what `Journal.watch` recorded at the same time; or an empty string.
    """

    phase: str
    step: tuple[int, int] | None
    meanwhile: str

    def __str__(self):
        done = f" (epoch {self.step[0]}, step {self.step[1]} done)" if self.step else ""
        return self.phase + done + (f", {self.meanwhile}" if self.meanwhile else "")


def last_moment(events):
    """Returns what a process was doing, by its journal."""
    phases = [event["phase"] for event in events if "phase" in event] or ["start of the interpreter"]
    changes = [event for event in events if "begins" in event or "ends" in event]
    steps = [event["step"] for event in events if "step" in event]
    return Moment(phases[-1], tuple(steps[-1]) if steps else None, changes[-1].get("begins", "") if changes else "")
