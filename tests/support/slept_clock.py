"""A clock that only `sleep` advances."""

import types


def slept_clock(monkeypatch, module):
    """Replaces `time` in `module`. `during` is called in each sleep; `now` is the time in seconds."""
    clock = types.SimpleNamespace(now=0.0, during=lambda: None)

    def sleep(seconds):
        clock.during()
        clock.now += seconds

    monkeypatch.setattr(module, "time", types.SimpleNamespace(monotonic=lambda: clock.now, sleep=sleep))
    return clock
