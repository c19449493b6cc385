"""The argument `mode` of MultiWorkerMirroredStrategy, and what local updates change in TensorFlow and Keras."""

import logging
from typing import Any

from tfdist.keras_internals.local_epochs import patch_local_epochs
from tfdist.local_updates.local_modes import DiLoCo, LocalMode, LocalSGD
from tfdist.local_updates.local_updates import LocalUpdates
from tfdist.parameter_server.modes import Synchronous
from tfdist.tensorflow_internals.rows_per_replica import patch_agreement_on_end
from tfdist.training.sample_shares import current_step
from tfdist.training.strategy_protocol import training_strategy

_log = logging.getLogger("tfdist")
_has_warned = False


def local_mode_of(mode: Any, shard_optimizer_state: Any, *, divides_rows: bool = False) -> LocalMode | None:
    """Returns the local mode that the argument `mode` demands; `None` if workers exchange in each update.

    Raises:
        ValueError: If it is invalid, or does not work together with `shard_optimizer_state`, or with `load_balancing`
            or `shares`, one of which is given if `divides_rows`.
    """
    if mode is None or mode == Synchronous():
        return None
    if not isinstance(mode, LocalSGD | DiLoCo):
        raise ValueError(
            f"Invalid `mode` of MultiWorkerMirroredStrategy. Received: mode={mode!r}. Expected: Synchronous(), "
            "LocalSGD(sync_every=...) or DiLoCo(sync_every=...) of `tfdist.strategies`."
        )
    if shard_optimizer_state:
        raise ValueError(
            "`shard_optimizer_state` does not work with local updates: each worker updates all variables by itself, so "
            f"it needs all slots. Received: shard_optimizer_state={shard_optimizer_state!r} and mode={mode!r}. "
            "Expected: one of them. Leave `shard_optimizer_state` out, or use `mode=Synchronous()`."
        )
    if divides_rows:
        raise ValueError(
            "`load_balancing` and `shares` do not work with local updates: rows are divided by times that workers "
            f"exchange in each step. Received: one of them and mode={mode!r}. Expected: one of the two. Leave "
            "`load_balancing` and `shares` out (a fast worker waits only where weights are exchanged), or use "
            "`mode=Synchronous()`."
        )
    return mode


def local_updates_of(strategy: Any, mode: LocalMode) -> LocalUpdates:
    """Returns the local updates of a strategy that is complete otherwise, and patches Keras."""
    patch_local_updates()
    return LocalUpdates(strategy, mode, _samples_of_step)


def patch_local_updates() -> None:
    """Patches TensorFlow and Keras for strategies with local updates."""
    patch_local_epochs(_is_local, _begin_epoch, _end_epoch, _mean_of_workers)
    patch_agreement_on_end(_ends_are_known)


def _is_local(strategy: Any) -> bool:
    return training_strategy(strategy).local_updates is not None


def _begin_epoch(strategy: Any, training: bool, knows_end: bool) -> None:
    strategy.local_updates.begin_epoch(knows_end=training and knows_end)
    if not training:
        strategy.local_updates.synchronize()
    elif not knows_end and strategy.num_workers > 1 and strategy.rank == 0:
        _warn_of_unknown_end()


def _end_epoch(strategy: Any, has_trained: bool) -> None:
    strategy.local_updates.end_epoch()
    if has_trained:
        strategy.local_updates.synchronize()


def _mean_of_workers(strategy: Any, values: list[float]) -> list[float]:
    return strategy.local_updates.mean_of_workers(values)


def _ends_are_known(strategy: Any) -> Any:
    return strategy.local_updates.ends_are_known if _is_local(strategy) else None


def _samples_of_step() -> Any:
    step = current_step()
    return None if step is None else step.samples_of_worker


def _warn_of_unknown_end() -> None:
    global _has_warned
    if not _has_warned:
        _log.warning(
            "The workers ask each other in each step whether the data has ended, because its number of steps is not "
            "known. Received: a dataset of unknown length, or `steps_per_epoch` with data that ends, or a number of "
            "steps that is no multiple of `steps_per_execution`. Expected, for local updates that exchange nothing: "
            "`dataset.repeat()` with `steps_per_epoch`, or "
            "`dataset.apply(tf.data.experimental.assert_cardinality(batches))`."
        )
    _has_warned = True
