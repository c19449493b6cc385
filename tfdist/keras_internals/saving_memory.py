"""Saves models whose weights are on other processes without holding all of them in this one."""

from typing import Any

from tfdist.patches import patch, replace
from tfdist.private_symbols import private
from tfdist.strategy_hooks import hooks_of

_saving = private("keras.src.saving:saving_lib", "writes a model into memory before it writes the file")
private("keras.src.saving.saving_lib:is_memory_sufficient", "whether it does so")


@patch
def patch_saving() -> None:
    """Makes Keras write and read `.keras` files layer by layer, not in memory, for models on other processes."""
    stock = _saving.is_memory_sufficient

    @replace(_saving, "is_memory_sufficient")
    def is_memory_sufficient(model: Any) -> bool:
        is_elsewhere = hooks_of(getattr(model, "distribute_strategy", None)).is_elsewhere
        return not is_elsewhere and bool(stock(model))
