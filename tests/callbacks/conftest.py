"""Reads TensorBoard's event files; replaces the clock of step times."""

import pathlib
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest


def _events(directory):
    import tensorflow as tf

    for path in sorted(pathlib.Path(directory).glob("*tfevents*")):
        for record in tf.data.TFRecordDataset(str(path)).as_numpy_iterator():
            yield tf.compat.v1.Event.FromString(record)


@pytest.fixture
def curves() -> Callable[..., dict[str, list[tuple[int, float]]]]:
    """`curves(directory)`: the points (step, value) of each tag, in the order of the files."""

    def read(directory):
        import tensorflow as tf

        found: dict[str, list[tuple[int, float]]] = {}
        for event in _events(directory):
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, float(tf.make_ndarray(value.tensor))))
        return found

    return read


@pytest.fixture
def clock(monkeypatch):
    """The clock by which steps are timed: a test sets `now`, in seconds."""
    from tfdist.callbacks import training_monitor

    clock = SimpleNamespace(now=0.0, time=time.time, time_ns=time.time_ns)
    clock.perf_counter = lambda: clock.now
    monkeypatch.setattr(training_monitor, "time", clock)
    return clock
