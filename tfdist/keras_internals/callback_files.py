"""Keras' callbacks that write logs and backups, on several workers: one worker writes to a path that they share."""

import inspect
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import keras

from tfdist.keras_internals.keras_callbacks import wrap_callback_list
from tfdist.keras_internals.running_fit import callers, is_call
from tfdist.patches import patch

# The attributes with the paths. `ModelCheckpoint` is not here: it saves models, as a program does (`saved_files`).
_PATHS = {keras.callbacks.CSVLogger: "filename", keras.callbacks.TensorBoard: "log_dir"}
_BACKUPS = {keras.callbacks.BackupAndRestore: "backup_dir"}
_FIT = inspect.unwrap(keras.Model.fit).__code__
_WRAPPERS = 6  # more than there are around the list of callbacks
_REDIRECTED = "_tfdist_redirected"


class SharedPaths(NamedTuple):
    """What the workers have exchanged about the paths of their callbacks.

    Attributes:
        elsewhere: The given paths that a worker with a lower rank writes.
        has_backups: Whether a worker has a callback that restores a backup.
    """

    elsewhere: frozenset[str]
    has_backups: bool


# The exchanges of a strategy: the paths of a worker, and whether it has backups; the epoch and update that it begins.
Share = Callable[[Any, Sequence[str], bool], SharedPaths]
Compare = Callable[[Any, int, int], None]


@patch
def patch_callback_files(has_workers: Callable[[Any], bool], share: Share, compare: Compare) -> None:
    """Lets one worker write to a path that callbacks of several workers have in `fit`.

    The others write to a temporary directory, as they must take part in what a callback exchanges with all workers.
    A backup is read by all of them.

    Args:
        has_workers: Whether a strategy is one of tfdist's with several workers.
        share: Exchanges the paths with all workers, which call it.
        compare: Raises an error if workers begin at different places.
    """

    def create(
        call: Callable[..., None],
        callback_list: Any,
        callbacks: Any = None,
        add_history: bool = False,
        add_progbar: bool = False,
        model: Any = None,
        **params: Any,
    ) -> None:
        strategy = getattr(model, "distribute_strategy", None)
        if has_workers(strategy) and _is_created_by_fit(model):
            listed = keras.tree.flatten(callbacks or [])
            for callback in listed:
                _restore(callback)  # after a `fit` that an exception has ended
            paths = {
                id(listed_callback): path
                for listed_callback in listed
                if (path := _path(listed_callback, _PATHS | _BACKUPS)) is not None
            }
            has_backups = any(_path(listed_callback, _BACKUPS) is not None for listed_callback in listed)
            shared = share(strategy, list(paths.values()), has_backups)
            muted = [
                listed_callback for listed_callback in listed if paths.get(id(listed_callback)) in shared.elsewhere
            ]
            for callback in muted:
                if _path(callback, _PATHS) is not None:
                    _redirect(callback, paths[id(callback)])
            vars(callback_list)[_REDIRECTED] = shared, muted
        call(callbacks, add_history, add_progbar, model, **params)

    def begin(call: Callable[..., None], callback_list: Any, logs: Any = None) -> None:
        call(logs)
        if _REDIRECTED not in vars(callback_list):
            return
        shared, muted = vars(callback_list)[_REDIRECTED]
        model = callback_list.model
        if shared.has_backups:
            updates = 0 if model.optimizer is None else int(model.optimizer.iterations.numpy())
            compare(model.distribute_strategy, int(model._initial_epoch or 0), updates)
        for callback in muted:
            if (path := _path(callback, _BACKUPS)) is not None:
                _redirect(callback, path)

    def end(call: Callable[..., None], callback_list: Any, logs: Any = None) -> None:
        try:
            call(logs)
        finally:
            for callback in vars(callback_list).pop(_REDIRECTED, (None, ()))[1]:
                _restore(callback)

    wrap_callback_list("__init__", create)
    wrap_callback_list("on_train_begin", begin)
    wrap_callback_list("on_train_end", end)


def _is_created_by_fit(model: Any) -> bool:
    return any(is_call(frame, _FIT, model) for frame in islice(callers(sys._getframe(1)), _WRAPPERS))


def _path(callback: Any, attributes: dict[type, str]) -> str | None:
    names = [name for known, name in attributes.items() if isinstance(callback, known)]
    return os.fspath(getattr(callback, names[0])).rstrip("/") if names else None


def _redirect(callback: Any, path: str) -> None:
    """Replaces the path in all attributes of the callback that begin with it."""
    folder = tempfile.TemporaryDirectory(prefix="tfdist-", ignore_cleanup_errors=True)
    there = os.path.join(folder.name, os.path.basename(path))
    before = {name: value for name, value in vars(callback).items() if isinstance(value, str | os.PathLike)}
    before = {name: value for name, value in before.items() if f"{os.fspath(value)}/".startswith(f"{path}/")}
    vars(callback).update({name: there + os.fspath(value)[len(path) :] for name, value in before.items()})
    vars(callback)[_REDIRECTED] = folder, before


def _restore(callback: Any) -> None:
    if _REDIRECTED in vars(callback):
        folder, before = vars(callback).pop(_REDIRECTED)
        vars(callback).update(before)
        folder.cleanup()
