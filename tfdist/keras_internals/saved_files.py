"""Models, checkpoints, logs and backups that several workers write to one path: readers see complete files."""

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.keras_internals.call_frames import is_within_call_of_fit
from tfdist.keras_internals.keras_callbacks import wrap_callback_list
from tfdist.patches import patch, replace
from tfdist.private_symbols import private
from tfdist.strategy_hooks import hooks_of
from tfdist.utils import atomic_files
from tfdist.utils.atomic_files import is_local

_saving = private("keras.src.saving:saving_lib", "writes a model into memory before it writes the file")
_hdf5 = private("keras.src.legacy.saving:legacy_h5_format", "writes `.h5` files")
_files = private("keras.src.utils:file_utils", "creates directories for `ModelCheckpoint`")
_prompts = private("keras.src.utils:io_utils", "asks before it overwrites a file")
_TrackableSaver = private(
    "tensorflow.python.checkpoint.checkpoint:TrackableSaver", "writes the files of `tf.train.Checkpoint`"
)
_saved_model = private("tensorflow.python.saved_model:save", "writes SavedModels")

# Takes a path, yields another one, and moves what was written there.
Replacing = Callable[[str], AbstractContextManager[str]]

# The attributes with the paths. `ModelCheckpoint` is not here: it saves models, as a program does.
_PATHS = {keras.callbacks.CSVLogger: "filename", keras.callbacks.TensorBoard: "log_dir"}
_BACKUPS = {keras.callbacks.BackupAndRestore: "backup_dir"}
_REDIRECTED = "_tfdist_redirected"


@patch
def patch_saved_files(replacing: Replacing) -> None:
    """Makes Keras write models and weights to a path beside the given one, and then replace the files there.

    Call this once in a process that is one of several workers.
    """
    started = time.time()
    written: set[str] = set()  # by this process

    def write_beside(owner: Any, name: str, *, creates_folder: bool) -> None:
        stock = getattr(owner, name)

        @replace(owner, name)
        def save(model: Any, filepath: Any, *args: Any, **kwargs: Any) -> None:
            if not is_local(filepath):
                return stock(model, filepath, *args, **kwargs)
            path = os.path.realpath(filepath)
            folder = os.path.dirname(path)
            if creates_folder or kwargs.get("zipped") is False:
                os.makedirs(folder, exist_ok=True)
            if not os.path.isdir(folder):
                return stock(model, filepath, *args, **kwargs)  # raises the error
            with replacing(path) as unfinished:
                stock(model, unfinished, *args, **kwargs)
            written.add(path)
            return None

    stock_makedirs, stock_ask = _files.makedirs, _prompts.ask_to_proceed_with_overwrite

    @replace(_files, "makedirs")
    def makedirs(path: Any) -> None:
        try:
            stock_makedirs(path)
        except FileExistsError:
            if not os.path.isdir(path):
                raise

    @replace(_prompts, "ask_to_proceed_with_overwrite")
    def ask_to_proceed_with_overwrite(filepath: Any) -> bool:
        path = os.path.realpath(filepath)
        is_of_another_worker = path not in written and os.path.getmtime(path) > started
        return is_of_another_worker or bool(stock_ask(filepath))

    write_beside(_saving, "save_model", creates_folder=False)
    write_beside(_saving, "save_weights_only", creates_folder=False)
    write_beside(_hdf5, "save_model_to_hdf5", creates_folder=True)


@patch
def patch_saving() -> None:
    """Makes Keras write and read `.keras` files layer by layer, not in memory, for models on other processes."""
    stock = _saving.is_memory_sufficient

    @replace(_saving, "is_memory_sufficient")
    def is_memory_sufficient(model: Any) -> bool:
        strategy = getattr(model, "distribute_strategy", None)
        return not hooks_of(strategy).are_weights_apart(strategy) and bool(stock(model))


@patch
def patch_checkpoint_files(replacing: Replacing) -> None:
    """Makes TensorFlow write eager checkpoints and SavedModels to a path beside the given one, and then replace it.

    Call this once in a process that is one of several workers.
    """
    stock_save, stock_export = _TrackableSaver.save, _saved_model.save_and_return_nodes

    @replace(_TrackableSaver, "save")
    def save(self: Any, file_prefix: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_local(file_prefix) or not tf.executing_eagerly():
            return stock_save(self, file_prefix, *args, **kwargs)
        folder = os.path.dirname(os.fspath(file_prefix))
        os.makedirs(folder or ".", exist_ok=True)
        with replacing(os.fspath(file_prefix)) as unfinished:
            written = stock_save(self, unfinished, *args, **kwargs).numpy().decode()
        return tf.constant(os.path.join(folder, os.path.basename(written)))

    @replace(_saved_model, "save_and_return_nodes")
    def save_and_return_nodes(obj: Any, export_dir: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_local(export_dir):
            return stock_export(obj, export_dir, *args, **kwargs)
        if variables := getattr(obj, "_all_variables", None):
            obj._all_variables = sorted(variables, key=_creation)
        path = os.path.realpath(export_dir)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with replacing(path) as unfinished:
            return stock_export(obj, unfinished, *args, **kwargs)


def _creation(variable: Any) -> int:
    """Returns a number that increases with each variable that a process creates.

    Keras exports variables in an order that differs between processes. The files of a SavedModel must fit together, of
    whichever workers they are.
    """
    number = str(variable._unique_id).rpartition("_")[2]
    return int(number) if number.isdecimal() else 0


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
        if has_workers(strategy) and is_within_call_of_fit(model):
            listed = keras.tree.flatten(callbacks or [])
            for callback in listed:
                _restore(callback)  # after a `fit` that an exception has ended
            paths = {id(callback): _path_of(callback, _PATHS | _BACKUPS) for callback in listed}
            has_backups = any(_path_of(callback, _BACKUPS) is not None for callback in listed)
            shared = share(strategy, [path for path in paths.values() if path is not None], has_backups)
            muted = [callback for callback in listed if paths[id(callback)] in shared.elsewhere]
            for callback in muted:
                if (path := _path_of(callback, _PATHS)) is not None:
                    _redirect(callback, path)
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
            if (path := _path_of(callback, _BACKUPS)) is not None:
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


def continue_files(callbacks: Sequence[Any]) -> None:
    """Lets this worker write to the paths of callbacks that another worker, which is lost, has written until now.

    A `CSVLogger` adds the rows that are missing; `TensorBoard` adds a file.
    """
    for callback in callbacks:
        if _REDIRECTED not in vars(callback):
            continue
        if isinstance(callback, keras.callbacks.CSVLogger) and is_local(callback.filename):
            _continue_rows(callback)
        elif isinstance(callback, keras.callbacks.TensorBoard):
            for writer in callback._writers.values():
                writer.close()
            callback._writers.clear()
            _restore(callback)
        else:
            _restore(callback)


def _continue_rows(callback: keras.callbacks.CSVLogger) -> None:
    own_lines = _lines_of(callback.filename)  # it is flushed after each row
    callback.csv_file.close()
    _restore(callback)
    lines = _lines_of(callback.filename)
    if lines and not lines[-1].endswith("\n"):
        lines.pop()  # the other worker ended while it wrote this row
    epochs = {line.partition(callback.sep)[0] for line in lines}
    lines += [line for line in own_lines if line.partition(callback.sep)[0] not in epochs]
    atomic_files.write(Path(callback.filename), "".join(lines).encode())
    callback.csv_file = open(callback.filename, "a", newline="")
    callback.append_header, callback.writer = not lines, None


def _lines_of(path: str) -> list[str]:
    try:
        return Path(path).read_bytes().decode().splitlines(keepends=True)
    except FileNotFoundError:
        return []


def _path_of(callback: Any, attributes: dict[type, str]) -> str | None:
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
