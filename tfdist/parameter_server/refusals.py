"""What cannot work under a parameter server strategy, said before it is tried."""

from typing import Any

from tfdist.keras_internals.accumulation import Accumulation
from tfdist.keras_internals.models import computes_over_all_replicas


def refuse_impossible(model: Any) -> None:
    """Looks at a compiled model.

    Raises:
      ValueError: it cannot be trained by workers; the message says why and what to do.
    """
    optimizer = model.optimizer
    if optimizer is None:
        raise ValueError(
            "The model has no optimizer. Received: compile(optimizer=None). Expected: one, whose updates the servers "
            "make. Name one in `compile`."
        )
    if model.run_eagerly:
        raise ValueError(
            "Workers run functions only. Received: run_eagerly=True. Expected: run_eagerly=False. To debug a step, "
            "train in one process without a strategy."
        )
    if model.jit_compile is True:
        raise ValueError(
            "XLA cannot compile a step that reads variables of servers. Received: jit_compile=True. Expected: "
            "jit_compile=False. Compile parts of the model by tf.function(jit_compile=True) instead."
        )
    if computes_over_all_replicas(model):
        raise ValueError(
            "Workers do not compute at the same time. Received: BatchNormalization(synchronized=True). Expected: "
            "synchronized=False. Each worker then normalizes by its own part of a batch."
        )
    if Accumulation(model).steps > 1:
        raise ValueError(
            "Accumulators on the servers would take every micro-step's gradient across the network. Received: an "
            "optimizer with gradient_accumulation_steps. Expected: an optimizer without. Give "
            "`accumulation_steps` to ParameterServerStrategy: each worker then adds up that many batches and pushes "
            "once."
        )
