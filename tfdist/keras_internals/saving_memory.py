"""Saves models whose weights are on other processes without holding all of them in this one."""

import functools
from collections.abc import Callable
from typing import Any

from tfdist.private_symbols import private

_saving = private("keras.src.saving:saving_lib", "writes a model into memory before it writes the file")
private("keras.src.saving.saving_lib:is_memory_sufficient", "whether it does so")


def patch_saving(is_elsewhere: Callable[[Any], bool]) -> None:
    """Makes Keras write and read `.keras` files layer by layer, not in memory, for models that `is_elsewhere`."""
    stock = _saving.is_memory_sufficient

    @functools.wraps(stock)
    def is_memory_sufficient(model: Any) -> bool:
        return not is_elsewhere(model) and bool(stock(model))

    _saving.is_memory_sufficient = is_memory_sufficient
