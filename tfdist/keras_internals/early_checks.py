"""Checks of a model's strategy before Keras does anything with it."""

import functools
from collections.abc import Callable
from typing import Any

from tfdist.keras_internals.symbols import trainer


def install_early_check(check: Callable[[Any], None]) -> None:
    """Calls `check(strategy)` when `fit` or `evaluate` begins to work, from now on; again with the same one at will.

    Callbacks are called for the first time when Keras has built the model from a batch, which fails under strategies
    that it cannot work with.
    """
    build = trainer.TensorFlowTrainer._maybe_symbolic_build
    if check in getattr(build, "early_checks", ()):
        return

    @functools.wraps(build)
    def checked(self: Any, iterator: Any = None, data_batch: Any = None) -> Any:
        if iterator is not None:
            check(self.distribute_strategy)
        return build(self, iterator=iterator, data_batch=data_batch)

    checked.early_checks = (*getattr(build, "early_checks", ()), check)  # type: ignore[attr-defined]
    trainer.TensorFlowTrainer._maybe_symbolic_build = checked
