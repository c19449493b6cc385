"""Writes checkpoints and SavedModels where several workers write to the same path: readers see only complete files."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from tfdist.patches import patch, replace
from tfdist.private_symbols import private
from tfdist.utils.atomic_files import is_local

_TrackableSaver = private(
    "tensorflow.python.checkpoint.checkpoint:TrackableSaver", "writes the files of `tf.train.Checkpoint`"
)
_saved_model = private("tensorflow.python.saved_model:save", "writes SavedModels")
private(
    "tensorflow.python.checkpoint.checkpoint:TrackableSaver.save",
    "uses temporary names that are the same in all processes",
)
private("tensorflow.python.saved_model.save:save_and_return_nodes", "copies assets to their final names")


@patch
def patch_checkpoint_files(replacing: Callable[[str], AbstractContextManager[str]]) -> None:
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
