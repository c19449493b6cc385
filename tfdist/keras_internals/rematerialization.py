"""Rejects Keras' rematerialization where it would lose gradients."""

import functools
from collections.abc import Callable
from typing import Any

from tfdist.private_symbols import private

_core = private("keras.src.backend.tensorflow:core", "rematerializes by a function that differentiates variables only")
private("keras.src.backend.tensorflow.core:remat", "as above")


def patch_rematerialization(is_in_stage: Callable[[], bool]) -> None:
    """Makes a rematerialized call raise an error while `is_in_stage()`.

    A stage takes the values of variables as arguments, and `tf.recompute_grad` gives no gradients of captured tensors.
    """
    stock = _core.remat

    @functools.wraps(stock)
    def remat(f: Callable[..., Any]) -> Callable[..., Any]:
        rematerialized = stock(f)

        @functools.wraps(f)
        def call(*args: Any, **kwargs: Any) -> Any:
            if is_in_stage():
                raise ValueError(
                    "Layers in stages cannot be rematerialized. Received: a call inside of keras.remat or "
                    "keras.RematScope. Expected: layers without it. Use more stages or more micro-batches to save "
                    "memory: with schedule='1f1b' stage s holds the activations of `stages - s` micro-batches."
                )
            return rematerialized(*args, **kwargs)

        return call

    _core.remat = remat
