"""Rejects what cannot work under a parameter server strategy before it is tried."""

from collections.abc import Sequence
from typing import Any

import keras

from tfdist.compression import MomentumCorrection, Policy
from tfdist.keras_internals.accumulation import Accumulation
from tfdist.keras_internals.model_introspection import computes_over_all_replicas
from tfdist.servers.server_monitor import is_reachable
from tfdist.tensorflow_internals.xla_functions import is_compiled


def reject_unsupported_model(model: Any) -> None:
    """Checks a compiled model."""
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


def reject_unsupported_clients(model: Any, policy: Policy) -> None:
    """Checks a compiled model for federated averaging."""
    optimizer, variables = model.optimizer, model.trainable_variables
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            "A loss scale would start again in every round. Received: a LossScaleOptimizer, or the dtype policy "
            "'mixed_float16'. Expected: an optimizer without a loss scale. Use 'mixed_bfloat16' or float32."
        )
    if optimizer is not None and Accumulation(model).steps > 1:
        raise ValueError(
            "A client updates its own weights after every batch. Received: an optimizer with "
            "gradient_accumulation_steps. Expected: an optimizer without it. Use larger batches in `dataset_fn`."
        )
    if optimizer is not None and optimizer.use_ema:
        raise ValueError(
            "A client's average of weights ends with the round. Received: an optimizer with use_ema=True. Expected: "
            "use_ema=False. Average the weights of the servers in a callback."
        )
    if is_compiled(model.train_step) or (model.jit_compile and model.jit_compile != "auto"):
        raise ValueError(
            "Clients do not compile their steps by XLA. Received: jit_compile=True. Expected: jit_compile=False or "
            "'auto' in `compile`, and no `@tf.function(jit_compile=True)` at `train_step`."
        )
    if any(getattr(variable, "overwrite_with_gradient", False) for variable in variables):
        raise ValueError(
            "The scales of float8 layers are not averages of clients. Received: a model with float8 layers. Expected: "
            "one without. Use 'mixed_bfloat16'."
        )
    if any(isinstance(policy.compressor_for(variable.path), MomentumCorrection) for variable in variables):
        raise ValueError(
            "Momentum correction is for gradients of single steps. Received: MomentumCorrection, under "
            "FederatedAveraging. Expected: the compressor without it; `server_optimizer` may have momentum."
        )


def reject_while_workers_are_lost(workers: Sequence[str], may_connect: bool) -> None:
    """Checks that another strategy of this process may connect to the cluster."""
    lost = [f"worker {index} at {address}" for index, address in enumerate(workers) if not is_reachable(address)]
    if lost or not may_connect:
        received = f"no answer from {', '.join(lost)}" if lost else "a strategy that is reconnecting to a lost worker"
        raise RuntimeError(
            "While a worker is lost, a process cannot create a second parameter server strategy: TensorFlow would "
            f"crash. Received: {received}. Expected: all {len(workers)} workers reachable. Create all strategies "
            "before training, keep using the present one, or try again when the worker has returned."
        )
