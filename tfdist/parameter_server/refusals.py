"""What cannot work under a parameter server strategy, said before it is tried."""

from collections.abc import Sequence
from typing import Any

from tfdist.keras_internals.accumulation import Accumulation
from tfdist.keras_internals.models import computes_over_all_replicas
from tfdist.parameter_server.serving import is_reachable


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


def refuse_while_workers_are_lost(workers: Sequence[str], may_connect: bool) -> None:
    """To be called before another strategy of this process connects to the cluster.

    Args:
      workers: the addresses of all workers.
      may_connect: whether no other strategy is connecting to a worker again just now.

    Raises:
      RuntimeError: a worker is lost, or has just come back; the message says what to do.
    """
    lost = [f"worker {index} at {address}" for index, address in enumerate(workers) if not is_reachable(address)]
    if lost or not may_connect:
        received = (
            f"no answer from {', '.join(lost)}" if lost else "a strategy that is connecting to a lost worker again"
        )
        raise RuntimeError(
            "While a worker is lost, no second parameter server strategy can be made in a process: TensorFlow would "
            f"crash. Received: {received}. Expected: all {len(workers)} workers up. Make all strategies before you "
            "train, or go on with the one that you have; or try again when the worker is back."
        )
