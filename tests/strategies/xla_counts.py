"""Counts what XLA compiles."""

from tfdist.keras_internals import compiled_calls, optimizers
from tfdist.tensorflow_internals.xla_functions import call_compiled

# XLA adds in another order: 26 updates of rate 0.01 change float32 weights below 1 by less than this.
TOLERANCE = 1e-5


def count_compiled(monkeypatch):
    """Returns how many calls of layers and losses, and how many updates, XLA has compiled until now."""
    counts = {"calls": 0, "updates": 0}

    def counted(name):
        def call(function, tensors, *handles):
            results = call_compiled(function, tensors, *handles)
            counts[name] += results is not None
            return results

        return call

    monkeypatch.setattr(compiled_calls, "call_compiled", counted("calls"))
    monkeypatch.setattr(optimizers, "call_compiled", counted("updates"))
    return counts
