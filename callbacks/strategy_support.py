"""What callbacks support under TensorFlow's own strategies: replacements to suggest, errors and warnings."""

import logging
from typing import Any

import tensorflow as tf

from tfdist.keras_internals.symbolic_build import add_early_check
from tfdist.tensorflow_internals.input_pipeline import batches_may_be_arrays
from tfdist.tensorflow_internals.placed_strategy import placed_devices
from tfdist.tensorflow_internals.python_function_results import copy_results_of_python_functions
from tfdist.training.strategy_protocol import is_tfdist_strategy, training_strategy

_log = logging.getLogger("tfdist")
_distribute, _experimental = tf.distribute, tf.distribute.experimental
_MULTI_WORKER = _distribute.MultiWorkerMirroredStrategy, _experimental.MultiWorkerMirroredStrategy
_PARAMETER_SERVER = _distribute.ParameterServerStrategy, _experimental.ParameterServerStrategy
_TPU = _distribute.TPUStrategy, _experimental.TPUStrategy
# Classes, the public name (the classes' own names differ), and the replacement in tfdist.strategies.
_KINDS: tuple[tuple[tuple[type, ...], str, str | None], ...] = (
    ((_distribute.MirroredStrategy,), "MirroredStrategy", "MirroredStrategy"),
    ((_experimental.CentralStorageStrategy,), "CentralStorageStrategy", "MirroredStrategy"),
    (_MULTI_WORKER, "MultiWorkerMirroredStrategy", "MultiWorkerMirroredStrategy"),
    (_PARAMETER_SERVER, "ParameterServerStrategy", "ParameterServerStrategy"),
    (_TPU, "TPUStrategy", None),
)
_has_warned_of_tpu = False
_has_warned_of_arrays = False


def describe_strategy(strategy: Any) -> str:
    """Returns the public name of a strategy and the library it belongs to, for messages."""
    if is_tfdist_strategy(strategy):
        return f"tfdist's {type(strategy).__name__}"
    if not tf.distribute.has_strategy() and strategy is tf.distribute.get_strategy():
        return "no strategy"
    known = next((name for kinds, name, _ in _KINDS if isinstance(strategy, kinds)), type(strategy).__name__)
    return f"tf.distribute's {known}"


def suggested_replacement(strategy: Any) -> str | None:
    """Returns the tfdist strategy that replaces one of TensorFlow's, or None if there is none, as for TPUs."""
    for kinds, _, replacement in _KINDS:
        if isinstance(strategy, kinds) and replacement is not None:
            return f"tfdist.strategies.{replacement}"
    return None


def rank_and_num_workers(strategy: Any) -> tuple[int, int]:
    """Returns the rank of this process and the number of processes that call `fit`, for FailureRecovery.

    Raises:
        ValueError: If the strategy is one of TensorFlow's for several workers, whose ranks are unknown.
    """
    if is_tfdist_strategy(strategy):  # under parameter servers only the chief calls `fit`
        return strategy.rank, 1 if isinstance(strategy, _PARAMETER_SERVER) else strategy.num_workers
    if _has_several_workers(strategy) or isinstance(strategy, _PARAMETER_SERVER):
        raise ValueError(
            "FailureRecovery does not know the workers of this strategy. Received: a model created under "
            f"{describe_strategy(strategy)}. Expected: `{suggested_replacement(strategy)}`, or a strategy of one "
            "process. Create the model under it."
        )
    return 0, 1


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
    if isinstance(tf_strategy, _PARAMETER_SERVER):
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
    if isinstance(strategy, _TPU) and not _has_warned_of_tpu:
        _has_warned_of_tpu = True
        _log.warning(
            "tfdist's callbacks are not tested on TPUs. They are tested on CPUs: without a strategy and under "
            "OneDeviceStrategy with jit_compile=True, and under MirroredStrategy without it. Check them first, as "
            "docs/any_strategy.md describes."
        )


def _has_several_workers(strategy: Any) -> bool:
    return isinstance(strategy, _MULTI_WORKER) and training_strategy(strategy).num_workers > 1


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
    is_multi_worker = type(strategy) in _MULTI_WORKER and _has_several_workers(strategy)
    if type(strategy) in _PARAMETER_SERVER or is_multi_worker:
        several = " with several workers" if is_multi_worker else ""
        raise ValueError(
            "Keras 3 cannot train under this strategy. Received: a model created under "
            f"{describe_strategy(strategy)}{several}. Expected: `{suggested_replacement(strategy)}`, which takes the "
            "same arguments. Import it in place of TensorFlow's."
        )
