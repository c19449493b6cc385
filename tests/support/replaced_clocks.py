"""Clocks in place of `time`: one that only `sleep` advances, and one that only the test sets."""

import types


def slept_clock(monkeypatch, module):
    """Replaces `time` in `module`. `during` is called in each sleep; `now` is the time in seconds."""
    clock = types.SimpleNamespace(now=0.0, during=lambda: None)

    def sleep(seconds):
        clock.during()
        clock.now += seconds

    monkeypatch.setattr(module, "time", types.SimpleNamespace(monotonic=lambda: clock.now, sleep=sleep))
    return clock


def set_clock(monkeypatch, *modules):
    """Replaces `time` in `modules`. `now` is the time in seconds."""
    clock = types.SimpleNamespace(now=100.0)
    clock.monotonic = clock.perf_counter = lambda: clock.now
    for module in modules:
        monkeypatch.setattr(module, "time", clock)
    return clock
