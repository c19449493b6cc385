"""Lets Grappler optimize each graph of this process's tests once, or not at all, instead of twice.

Tests train for few steps, so that optimizing a graph takes longer than running it: a third of the processor time of a
training, the second pass a sixth. In one pass all optimizers of TensorFlow's default run, in its order.

After one pass, graphs that differ between processes may round differently. So programs of several processes keep
TensorFlow's default, and so do all tests if the environment has `TEST_GRAPPLER=twice`, as in `make test-long` and `make
matrix`.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

_passes = "once"


def install() -> None:
    """Changes the configuration of functions, before TensorFlow starts."""
    from tensorflow.core.protobuf import rewriter_config_pb2
    from tensorflow.python.eager import context

    of_tensorflow = context.Context.config.fget

    def config(self: Any) -> Any:
        found = of_tensorflow(self)
        options, passes = found.graph_options.rewrite_options, os.environ.get("TEST_GRAPPLER", _passes)
        if passes == "once":
            options.meta_optimizer_iterations = rewriter_config_pb2.RewriterConfig.ONE
        elif passes == "off":
            options.disable_meta_optimizer = True
        return found

    context.Context.config = property(config)


@contextlib.contextmanager
def grappler(passes: str) -> Iterator[None]:
    """Optimizes graphs "once", or "twice", or not ("off") within a `with` block, after `install`."""
    global _passes
    before, _passes = _passes, passes
    _forget_configuration()
    try:
        yield
    finally:
        _passes = before
        _forget_configuration()


def _forget_configuration() -> None:
    """TensorFlow keeps the configuration of functions for each thread."""
    if "tensorflow" in sys.modules:
        from tensorflow.python.eager import context

        context.context().function_call_options = None
