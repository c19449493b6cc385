"""How models are saved: complete files where several workers save to one path, and without all weights in memory."""

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from tfdist.patches import patch, replace
from tfdist.private_symbols import private
from tfdist.strategy_hooks import hooks_of
from tfdist.utils.atomic_files import is_local

_saving = private("keras.src.saving:saving_lib", "writes a model into memory before it writes the file")
_hdf5 = private("keras.src.legacy.saving:legacy_h5_format", "writes `.h5` files")
_files = private("keras.src.utils:file_utils", "creates directories for `ModelCheckpoint`")
_prompts = private("keras.src.utils:io_utils", "asks before it overwrites a file")
for _path, _why in {
    "keras.src.saving.saving_lib:is_memory_sufficient": "whether it does so",
    "keras.src.saving.saving_lib:save_model": "opens the file at once, which other workers write, too",
    "keras.src.saving.saving_lib:save_weights_only": "likewise",
    "keras.src.legacy.saving.legacy_h5_format:save_model_to_hdf5": "likewise",
    "keras.src.utils.file_utils:makedirs": "fails if another worker has just created the directory",
    "keras.src.utils.io_utils:ask_to_proceed_with_overwrite": "asks also if another worker has just written the file",
}.items():
    private(_path, _why)

# Takes a path, yields another one, and moves what was written there.
Replacing = Callable[[str], AbstractContextManager[str]]


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
        is_elsewhere = hooks_of(getattr(model, "distribute_strategy", None)).is_elsewhere
        return not is_elsewhere and bool(stock(model))
