"""Paths that several workers write: what is saved there is always complete, and one worker writes logs."""

import hashlib
import os
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.keras_internals.saved_files import (
    SharedPaths,
    patch_callback_files,
    patch_checkpoint_files,
    patch_saved_files,
)
from tfdist.strategies.replicated_hooks import HOOKS
from tfdist.strategy_hooks import hooks_of
from tfdist.utils.atomic_files import replacing_all


def patch_files() -> None:
    """Makes this process, one of several workers, write files that others may write at the same time."""
    patch_saved_files(replacing_all)
    patch_checkpoint_files(replacing_all)
    patch_callback_files(_has_workers, share_paths, compare_starts)


def _has_workers(strategy: Any) -> bool:
    return hooks_of(strategy) is HOOKS and strategy.num_workers > 1


def share_paths(strategy: Any, paths: Sequence[str], has_backups: bool) -> SharedPaths:
    """Exchanges the paths of the callbacks of all workers; all call this when `fit` begins."""
    if strategy._elastic is not None and strategy._elastic.starts_late:
        return SharedPaths(frozenset(paths), has_backups=False)
    numbers = {path: _number_of(path) for path in paths}
    rows = _rows_of_workers(strategy, [[int(has_backups), 0], *([0, number] for number in numbers.values())])
    elastic = strategy._elastic
    order = list(range(strategy.num_workers)) if elastic is None else elastic.ranks_by_age
    if strategy.rank not in order:  # this worker repeats what the others have exchanged
        return SharedPaths(frozenset(paths), has_backups=False)
    before = order[: order.index(strategy.rank)]
    earlier = {number for rank, _, number in rows if rank in before}
    elsewhere = frozenset(path for path, number in numbers.items() if number in earlier)
    return SharedPaths(elsewhere, any(has for _, has, _ in rows))


def _number_of(path: str) -> int:
    """Returns a number, not 0, that is the same on all workers that have the same path."""
    name = path if "://" in path else os.path.abspath(path)
    return 1 + int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")


def compare_starts(strategy: Any, epoch: int, updates: int) -> None:
    """Compares where the workers begin, after their callbacks have read backups. All workers call this.

    Raises:
        ValueError: They do not begin in the same epoch, after the same number of updates.
    """
    starts = {rank: tuple(start) for rank, *start in _rows_of_workers(strategy, [[epoch, updates]])}
    different_ranks = [rank for rank, start in sorted(starts.items()) if start != starts[0]]
    if different_ranks:
        texts = [
            f"epoch {starts[rank][0]} after {starts[rank][1]} updates on worker {rank}"
            for rank in (0, different_ranks[0])
        ]
        raise ValueError(
            f"The workers have different backups of BackupAndRestore. Received: {texts[0]}, {texts[1]}. Expected: the "
            "same on all workers. Use a directory that they share, or FailureRecovery; if each worker has its own "
            "directory, remove the backups of all workers."
        )


def _rows_of_workers(strategy: Any, rows: list[list[int]]) -> list[list[int]]:
    """Returns the rows of all workers, each with the rank before it; workers may have different numbers of them."""
    own_rows = tf.constant([[strategy.rank, *row] for row in rows], tf.int64)
    return strategy.gather(own_rows, axis=0).numpy().tolist()
