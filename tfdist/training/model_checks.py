"""Checks, before a step is traced, that a model can run on several replicas."""

import functools
import logging
from typing import Any

import tensorflow as tf

from tfdist.keras_internals.model_introspection import computes_over_all_replicas, is_made_under
from tfdist.tensorflow_internals.xla_functions import workers_with_other_cpus

_log = logging.getLogger("tfdist")


def check_model(model: Any, strategy: Any, *, training: bool) -> None:
    """Raises an error if a step of `model` cannot run under `strategy`; warns if its replicas may diverge.

    Raises:
        ValueError: The model, its metrics or its optimizer were not created under the strategy's scope.
    """
    variables = [*model.variables, *model.metrics_variables]
    stray = next((v for v in variables if not isinstance(v.value, tf.distribute.DistributedValues)), None)
    if stray is not None:
        raise ValueError(
            "A variable was created outside the strategy's scope, so it is not on all replicas. "
            f"Received: {stray.path!r}, created outside {type(strategy).__name__}.scope(). Expected: the model, its "
            "metrics (also the ones given to `compile`), the optimizer and `model.compile` within one "
            "`with strategy.scope():` block. Move them there. What builds layers later, as `adapt` of a layer or a "
            "`fit` of the model's own, belongs there too."
        )
    optimizer = model.optimizer if training else None
    if optimizer is not None and not is_made_under(optimizer, strategy):
        raise ValueError(
            "The optimizer was created outside the strategy's scope, so its variables are not on all replicas. "
            f"Received: {type(optimizer).__name__} {optimizer.name!r}, created outside "
            f"{type(strategy).__name__}.scope(). Expected: the model, the optimizer and `model.compile` within one "
            "`with strategy.scope():` block. Move them there."
        )
    if training and strategy.local_updates is not None and computes_over_all_replicas(model):
        raise ValueError(
            "A layer normalizes over the samples of all replicas, and workers with local updates exchange nothing in a "
            "step. Received: a layer with `synchronized=True`. Expected: `BatchNormalization(synchronized=False)`, "
            "whose statistics are averaged when weights are exchanged, or `mode=Synchronous()`."
        )
    # "auto" leaves these workers without XLA.
    if training and model.jit_compile and strategy.rank == 0 and (workers := workers_with_other_cpus()):
        _warn_of_other_cpus(workers)


@functools.cache  # once
def _warn_of_other_cpus(workers: tuple[int, ...]) -> None:
    differ = f"worker {workers[0]}" if len(workers) == 1 else f"workers {', '.join(map(str, workers))}"
    _log.warning(
        "The weights of the workers may differ in the last bit: `jit_compile=True`, and XLA uses all instructions of "
        "each CPU. Received: %s with other CPU instructions than worker 0. Expected: equal ones on all workers. "
        "Compile with `model.compile(..., jit_compile=False)`, or use machines of one type.",
        differ,
    )
