"""Rejects, before it is tried, what cannot work under a parameter server strategy."""

from collections.abc import Sequence
from typing import Any

from tfdist.keras_internals.accumulation import Accumulation
from tfdist.keras_internals.model_introspection import computes_over_all_replicas
from tfdist.servers.server_monitor import is_reachable


def reject_unsupported_model(model: Any) -> None:
    """Checks a compiled model.

    Raises:
        ValueError: Workers cannot train it; the message says why, and the remedy.
    """
    optimizer = model.optimizer
    if optimizer is None:
        raise ValueError(
            "The model has no optimizer. Received: compile(optimizer=None). Expected: an optimizer, which the servers "
            "apply. Give one to `compile`."
        )
    if model.run_eagerly:
        raise ValueError(
            "Workers run functions only. Received: run_eagerly=True. Expected: run_eagerly=False. To debug a step, "
            "train in one process without a strategy."
        )
    if computes_over_all_replicas(model):
        raise ValueError(
            "Workers do not compute at the same time. Received: BatchNormalization(synchronized=True). Expected: "
            "synchronized=False. Each worker then normalizes by its own part of a batch."
        )
    if Accumulation(model).steps > 1:
        raise ValueError(
            "Accumulators on the servers would send every micro-step's gradient across the network. Received: an "
            "optimizer with gradient_accumulation_steps. Expected: an optimizer without it. Pass "
            "`gradient_accumulation_steps` to ParameterServerStrategy: each worker then accumulates that many batches "
            "and pushes once."
        )


def reject_while_workers_are_lost(workers: Sequence[str], may_connect: bool) -> None:
    """Checks that another strategy of this process may connect to the cluster.

    Args:
        workers: The addresses of all workers.
        may_connect: Whether no other strategy is reconnecting to a worker at the moment.

    Raises:
        RuntimeError: A worker is lost or has just returned; the message says what to do.
    """
    lost = [f"worker {index} at {address}" for index, address in enumerate(workers) if not is_reachable(address)]
    if lost or not may_connect:
        received = f"no answer from {', '.join(lost)}" if lost else "a strategy that is reconnecting to a lost worker"
        raise RuntimeError(
            "While a worker is lost, a process cannot create a second parameter server strategy: TensorFlow would "
            f"crash. Received: {received}. Expected: all {len(workers)} workers reachable. Create all strategies "
            "before training, keep using the present one, or try again when the worker has returned."
        )
