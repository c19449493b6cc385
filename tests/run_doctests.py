"""Runs the examples of the docstrings of the modules it is given, and prints the outcome as JSON.

A program of its own, because some examples need two replicas: logical devices have to be made before TensorFlow is
first used, which another test of the same process may have done.

    python tests/run_doctests.py tfdist.versions ...
"""

import contextlib
import doctest
import importlib
import io
import json
import sys
import traceback

OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
REPLICAS = 2


def make_replicas() -> None:
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * REPLICAS)


def run(name: str) -> dict[str, object]:
    report = io.StringIO()
    try:
        # doctest prints its report; what an example prints to stderr is not part of it.
        with contextlib.redirect_stdout(report):
            result = doctest.testmod(importlib.import_module(name), optionflags=OPTIONS)
        return {"attempted": result.attempted, "failed": result.failed, "report": report.getvalue()}
    except Exception:
        return {"attempted": 0, "failed": 1, "report": report.getvalue() + traceback.format_exc()}


if __name__ == "__main__":
    make_replicas()
    print(json.dumps({name: run(name) for name in sys.argv[1:]}))
