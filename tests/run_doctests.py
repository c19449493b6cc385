"""Runs the examples in the docstrings of the given modules and prints the outcomes as JSON.

A separate program, because some examples need two replicas: logical devices must be configured before TensorFlow is
first used, and another test of the same process may have used it.

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


def create_replicas() -> None:
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * REPLICAS)


def run(name: str) -> dict[str, object]:
    report = io.StringIO()
    try:
        # doctest prints its report to stdout. Examples' output to stderr is not part of it.
        with contextlib.redirect_stdout(report):
            result = doctest.testmod(importlib.import_module(name), optionflags=OPTIONS)
        return {"attempted": result.attempted, "failed": result.failed, "report": report.getvalue()}
    except Exception:
        return {"attempted": 0, "failed": 1, "report": report.getvalue() + traceback.format_exc()}


if __name__ == "__main__":
    create_replicas()
    print(json.dumps({name: run(name) for name in sys.argv[1:]}))
