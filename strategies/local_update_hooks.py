"""The argument `mode` of MultiWorkerMirroredStrategy, and what strategies with local updates do in an epoch."""

import functools
import logging
from typing import Any

from tfdist.local_updates.local_modes import DiLoCo, LocalMode, LocalSGD
from tfdist.parameter_server.modes import Synchronous
from tfdist.training.sample_shares import current_step

_log = logging.getLogger("tfdist")


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


def begin_epoch(strategy: Any, training: bool, knows_end: bool) -> None:
    """Lets workers that train by themselves draw batches without asking each other, where that is possible."""
    if strategy.metric_totals is not None:
        strategy.metric_totals.clear()
    if strategy.local_updates is None:
        return
    strategy.local_updates.begin_epoch(knows_end=training and knows_end)
    if not training:
        strategy.local_updates.synchronize()
    elif not knows_end and strategy.num_workers > 1 and strategy.rank == 0:
        _warn_of_unknown_end()


def end_epoch(strategy: Any, has_trained: bool) -> None:
    """Makes all weights equal after training."""
    if strategy.local_updates is not None:
        strategy.local_updates.end_epoch()
        if has_trained:
            strategy.local_updates.synchronize()


def mean_of_workers(strategy: Any, numbers: list[Any]) -> list[float] | None:
    """Averages this worker's logs with those of the others, which have computed others."""
    if strategy.local_updates is None:
        return None
    return strategy.local_updates.mean_of_workers([float(number) for number in numbers])


def ends_are_known(strategy: Any) -> Any:
    """Returns a bool variable, which is true in an epoch whose number of steps all workers know."""
    return None if strategy.local_updates is None else strategy.local_updates.ends_are_known


def samples_of_step() -> Any:
    """Returns the samples of this worker in the Keras step that is running; `None` in a custom loop."""
    step = current_step()
    return None if step is None else step.samples_of_worker


@functools.cache  # warns once
def _warn_of_unknown_end() -> None:
    _log.warning(
        "The workers ask each other in each step whether the data has ended, because its number of steps is not known. "
        "Received: a dataset of unknown length, or `steps_per_epoch` with data that ends, or a number of steps that is "
        "no multiple of `steps_per_execution`. Expected, for local updates that exchange nothing: `dataset.repeat()` "
        "with `steps_per_epoch`, or `dataset.apply(tf.data.experimental.assert_cardinality(batches))`."
    )
