"""What callbacks support under TensorFlow's own strategies: errors and warnings."""

import logging
from typing import Any

from tfdist.keras_internals.symbolic_build import add_early_check
from tfdist.tensorflow_internals.input_pipeline import batches_may_be_arrays
from tfdist.tensorflow_internals.placed_strategy import placed_devices
from tfdist.tensorflow_internals.python_function_results import copy_results_of_python_functions
from tfdist.training.strategy_kinds import (
    MULTI_WORKER,
    PARAMETER_SERVER,
    TPU,
    describe_strategy,
    has_several_workers,
    is_of_parameter_servers,
    suggested_replacement,
)
from tfdist.training.strategy_protocol import is_tfdist_strategy, training_strategy

_log = logging.getLogger("tfdist")
_has_warned_of_tpu = False
_has_warned_of_arrays = False


def check_strategies_early() -> None:
    """Makes `fit` check the strategy before it builds the model. Further calls do nothing.

    It raises where Keras cannot train under it, and keeps TensorFlow from overwriting the user's arrays, with a
    warning.
    """
    add_early_check(_protect_arrays)
    add_early_check(_reject_unsupported)  # the last one is called first


def check_equal_replicas(name: str, model: Any) -> None:
    """Refuses strategies whose replicas do not hold equal copies of all variables, for the callback `name`.

    Raises:
        ValueError: The model is under such a strategy.
    """
    tf_strategy = model.distribute_strategy
    strategy = training_strategy(tf_strategy)
    reason = ""
    if is_of_parameter_servers(tf_strategy):
        reason = "whose variables are on servers, once each"
    elif placed_devices(tf_strategy):
        reason = "whose stages hold different variables"
    elif strategy.local_updates is not None:
        reason = "whose workers train by themselves between two exchanges of weights"
    elif strategy.state_sharding is not None:
        reason = "whose replicas hold different parts of the optimizer's state"
    elif not is_tfdist_strategy(tf_strategy) and tf_strategy.num_replicas_in_sync > 1:
        reason = "whose replicas may differ"
    if reason:
        raise ValueError(
            f"{name} needs replicas that hold equal copies of all variables between two steps. Received: a model "
            f"created under {describe_strategy(tf_strategy)}, {reason}. Expected: `tfdist.strategies.MirroredStrategy` "
            f"or `MultiWorkerMirroredStrategy`, without `shard_optimizer_state`, `LocalSGD` and `DiLoCo`. Leave {name} "
            "or these out."
        )


def warn_untested_on_tpu(strategy: Any) -> None:
    """Logs, once per process, that the callbacks are not tested on TPUs."""
    global _has_warned_of_tpu
    if isinstance(strategy, TPU) and not _has_warned_of_tpu:
        _has_warned_of_tpu = True
        _log.warning(
            "tfdist's callbacks are not tested on TPUs. They are tested on CPUs: without a strategy and under "
            "OneDeviceStrategy with jit_compile=True, and under MirroredStrategy without it. Check them first, as "
            "docs/any_strategy.md describes."
        )


def _protect_arrays(strategy: Any, dataset: Any) -> None:
    global _has_warned_of_arrays
    if is_tfdist_strategy(strategy) or strategy.num_replicas_in_sync == 1:
        return
    # Other devices receive copies of the rows.
    if not any("CPU" in device for device in strategy.extended.worker_devices) or not batches_may_be_arrays(dataset):
        return
    copy_results_of_python_functions()
    if not _has_warned_of_arrays:
        _has_warned_of_arrays = True
        replacement = suggested_replacement(strategy) or "tfdist.strategies.MirroredStrategy"
        _log.warning(
            "TensorFlow overwrites arrays and memory-mapped files whose rows it divides among CPU replicas. Received: "
            f"batches from Python, as of a generator or a `PyDataset`, under {describe_strategy(strategy)} with "
            f"{strategy.num_replicas_in_sync} replicas. tfdist's callbacks have TensorFlow copy such batches from here "
            f"on; earlier ones, and programs without the callbacks, need `{replacement}`. Write `strategy = "
            f"{replacement}(...)`."
        )


def _reject_unsupported(strategy: Any, _: Any) -> None:
    # Only TensorFlow's own classes: a subclass may have repaired what Keras lacks, as tfdist's do.
    is_multi_worker = type(strategy) in MULTI_WORKER and has_several_workers(strategy)
    if type(strategy) in PARAMETER_SERVER or is_multi_worker:
        several = " with several workers" if is_multi_worker else ""
        raise ValueError(
            "Keras 3 cannot train under this strategy. Received: a model created under "
            f"{describe_strategy(strategy)}{several}. Expected: `{suggested_replacement(strategy)}`, which takes the "
            "same arguments. Import it in place of TensorFlow's."
        )
