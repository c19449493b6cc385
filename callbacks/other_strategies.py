"""TensorFlow's own strategies, as callbacks see them: what to use instead, what cannot work, what is not tried."""

import logging
from typing import Any

import tensorflow as tf

from tfdist.keras_internals.early_checks import install_early_check

_log = logging.getLogger("tfdist")
_distribute, _experimental = tf.distribute, tf.distribute.experimental
_WORKERS = _distribute.MultiWorkerMirroredStrategy, _experimental.MultiWorkerMirroredStrategy
_SERVERS = _distribute.ParameterServerStrategy, _experimental.ParameterServerStrategy
_TPUS = _distribute.TPUStrategy, _experimental.TPUStrategy
# Kinds, their names (those of the classes are others), and what to use in their place.
_KINDS: tuple[tuple[tuple[type, ...], str, str | None], ...] = (
    ((_distribute.MirroredStrategy,), "MirroredStrategy", "MirroredStrategy"),
    ((_experimental.CentralStorageStrategy,), "CentralStorageStrategy", "MirroredStrategy"),
    (_WORKERS, "MultiWorkerMirroredStrategy", "MultiWorkerMirroredStrategy"),
    (_SERVERS, "ParameterServerStrategy", "ParameterServerStrategy"),
    (_TPUS, "TPUStrategy", None),
)
_has_told_of_tpus = False


def is_of_tfdist(strategy: Any) -> bool:
    """Whether a strategy is one of `tfdist.strategies`."""
    return hasattr(strategy, "gradient_exchange") or hasattr(strategy, "worker_counts")


def described(strategy: Any) -> str:
    """What a model was made under, for messages."""
    if is_of_tfdist(strategy):
        return f"tfdist's {type(strategy).__name__}"
    if not tf.distribute.has_strategy() and strategy is tf.distribute.get_strategy():
        return "no strategy"
    known = next((name for kinds, name, _ in _KINDS if isinstance(strategy, kinds)), type(strategy).__name__)
    return f"tf.distribute's {known}"


def replacement_of(strategy: Any) -> str | None:
    """The strategy of tfdist's to use in the place of one of TensorFlow's; `None` if there is none, as for TPUs."""
    for kinds, _, replacement in _KINDS:
        if isinstance(strategy, kinds) and replacement is not None:
            return f"tfdist.strategies.{replacement}"
    return None


def place_of(strategy: Any) -> tuple[int, int]:
    """The rank of this worker and the number of workers, for FailureRecovery.

    Raises:
      ValueError: the strategy is one of TensorFlow's of several workers, whose places it does not know.
    """
    if hasattr(strategy, "num_workers"):
        return strategy.rank, strategy.num_workers
    if hasattr(strategy, "worker_counts"):  # the chief trains for the workers, which only compute
        return 0, 1
    if _has_several_workers(strategy) or isinstance(strategy, _SERVERS):
        raise ValueError(
            f"FailureRecovery does not know the workers of this strategy. Received: a model made under "
            f"{described(strategy)}. Expected: `{replacement_of(strategy)}`, or a strategy of one process. Make the "
            "model under it."
        )
    return 0, 1


def check_early() -> None:
    """Has `fit` say at once, with the remedy, that Keras cannot train under a strategy; to be called again at will."""
    install_early_check(_refuse_what_keras_cannot)


def tell_of_tpus(strategy: Any) -> None:
    """Logs, once a process, that nothing was tried on TPUs, and what was tried in their place."""
    global _has_told_of_tpus
    if isinstance(strategy, _TPUS) and not _has_told_of_tpus:
        _has_told_of_tpus = True
        _log.warning(
            "tfdist's callbacks have not been tried on TPUs. Tested in their place, on CPUs: training without a "
            "strategy and under OneDeviceStrategy with jit_compile=True, and under MirroredStrategy without. Before "
            "you rely on them, try them as docs/any_strategy.md says."
        )


def _has_several_workers(strategy: Any) -> bool:
    if not isinstance(strategy, _WORKERS):
        return False
    resolver = strategy.cluster_resolver
    jobs = resolver.cluster_spec().as_dict() if resolver is not None and resolver.cluster_spec() else {}
    return sum(len(jobs.get(job, ())) for job in ("chief", "worker")) > 1


def _refuse_what_keras_cannot(strategy: Any) -> None:
    # TensorFlow's own classes alone: someone else's subclass may have been repaired, as tfdist's are.
    if type(strategy) in _SERVERS or (type(strategy) in _WORKERS and _has_several_workers(strategy)):
        several = " with several workers" if type(strategy) in _WORKERS else ""
        raise ValueError(
            f"Keras 3 cannot train under this strategy. Received: a model made under {described(strategy)}{several}. "
            f"Expected: `{replacement_of(strategy)}`, which takes the same arguments. Import that in its place."
        )
