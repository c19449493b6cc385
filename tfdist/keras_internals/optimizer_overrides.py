"""Which parts of an update the class of an optimizer defines itself."""

from typing import Any

from tfdist.keras_internals.keras_symbols import TFOptimizer


def overridden_update(optimizer: Any) -> str | None:
    """Returns the method of an optimizer's class, if any, that updates in another way, as MultiOptimizer does."""
    names = ("apply", "apply_gradients", "_backend_apply_gradients", "_clip_gradients")
    return next((name for name in names if getattr(type(optimizer), name) is not getattr(TFOptimizer, name)), None)


def has_own_update_step(optimizer: Any) -> bool:
    """Whether the class of an optimizer changes state once in the update of all variables, as Nadam does."""
    return type(optimizer)._backend_update_step is not TFOptimizer._backend_update_step


def has_own_weight_decay(optimizer: Any) -> bool:
    """Whether the class of an optimizer decays weights itself, by assigning Keras' variables, as Muon does."""
    return type(optimizer)._apply_weight_decay is not TFOptimizer._apply_weight_decay
