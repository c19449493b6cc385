"""Lets Grappler optimize each graph once in tests, not twice, which took a sixth of the processor time of a training.

Tests train for few steps, so that optimizing a graph takes longer than running it. All optimizers of TensorFlow's
default run, in its order. `TEST_GRAPPLER=twice` in the environment leaves the default: `make test-long` and `make
matrix` set it.
"""

import os
from typing import Any


def install() -> None:
    """Changes the configuration of functions. Call it after TensorFlow has been imported, and before it starts."""
    if os.environ.get("TEST_GRAPPLER") == "twice":
        return
    from tensorflow.core.protobuf import rewriter_config_pb2
    from tensorflow.python.eager import context

    with_both = context.Context.config.fget

    def config(self: Any) -> Any:
        found = with_both(self)
        found.graph_options.rewrite_options.meta_optimizer_iterations = rewriter_config_pb2.RewriterConfig.ONE
        return found

    context.Context.config = property(config)
