"""The kinds of strategies: their names for messages, their replacements, and the processes that train under them."""

from typing import Any

import tensorflow as tf

from tfdist.training.strategy_protocol import is_tfdist_strategy, training_strategy

_distribute, _experimental = tf.distribute, tf.distribute.experimental
MULTI_WORKER = _distribute.MultiWorkerMirroredStrategy, _experimental.MultiWorkerMirroredStrategy
PARAMETER_SERVER = _distribute.ParameterServerStrategy, _experimental.ParameterServerStrategy
TPU = _distribute.TPUStrategy, _experimental.TPUStrategy
# Classes, the public name (the classes' own names differ), and the replacement in tfdist.strategies.
_KINDS: tuple[tuple[tuple[type, ...], str, str | None], ...] = (
    ((_distribute.MirroredStrategy,), "MirroredStrategy", "MirroredStrategy"),
    ((_experimental.CentralStorageStrategy,), "CentralStorageStrategy", "MirroredStrategy"),
    (MULTI_WORKER, "MultiWorkerMirroredStrategy", "MultiWorkerMirroredStrategy"),
    (PARAMETER_SERVER, "ParameterServerStrategy", "ParameterServerStrategy"),
    (TPU, "TPUStrategy", None),
)


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


def rank_and_num_workers(strategy: Any, asking: str = "FailureRecovery") -> tuple[int, int]:
    """Returns the rank of this process and the number of processes that train, for the class that is `asking`.

    Raises:
        ValueError: If the strategy is one of TensorFlow's for several workers, whose ranks are unknown.
    """
    if is_tfdist_strategy(strategy):  # under parameter servers only the chief calls `fit`
        return strategy.rank, 1 if is_of_parameter_servers(strategy) else strategy.num_workers
    if has_several_workers(strategy) or is_of_parameter_servers(strategy):
        raise ValueError(
            f"{asking} does not know the workers of this strategy. Received: a model created under "
            f"{describe_strategy(strategy)}. Expected: `{suggested_replacement(strategy)}`, or a strategy of one "
            "process. Create the model under it."
        )
    return 0, 1


def is_of_parameter_servers(strategy: Any) -> bool:
    """Whether the variables of a strategy are on parameter servers."""
    return isinstance(strategy, PARAMETER_SERVER)


def has_several_workers(strategy: Any) -> bool:
    """Whether a strategy of TensorFlow has workers besides this process."""
    return isinstance(strategy, MULTI_WORKER) and training_strategy(strategy).num_workers > 1
