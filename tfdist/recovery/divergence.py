"""A training that `keras.callbacks.TerminateOnNaN` has ended: what it has come to is not worth saving."""

from collections.abc import Iterable, Mapping
from typing import Any

import keras
import numpy as np

from tfdist.recovery.notices import warn


def is_ended_by_nan(model: Any, callbacks: Iterable[Any], logs: Mapping[str, Any] | None) -> bool:
    """Whether `TerminateOnNaN` ends the training after the step that has logged `logs`.

    To be called when all `callbacks` have seen that step: one of its subclasses may let some losses pass. Logs are
    those of all replicas, so that all workers find the same.

    >>> import keras, types
    >>> ended, watches = types.SimpleNamespace(stop_training=True), [keras.callbacks.TerminateOnNaN()]
    >>> is_ended_by_nan(ended, watches, {"loss": float("inf")}), is_ended_by_nan(ended, [], {"loss": float("inf")})
    (True, False)
    >>> is_ended_by_nan(types.SimpleNamespace(stop_training=False), watches, {"loss": float("inf")})
    False
    """
    if not model.stop_training:
        return False
    loss = (logs or {}).get("loss")
    watches = any(isinstance(callback, keras.callbacks.TerminateOnNaN) for callback in callbacks)
    return watches and loss is not None and not bool(np.all(np.isfinite(loss)))


def tell_of_nan(step: int, directory: Any) -> None:
    """Warns that nothing was saved, and says how to go on."""
    warn(
        f"TerminateOnNaN has ended the training, which is not marked as complete. Received: a loss that is not finite, "
        f"at step {step}. Expected: a finite one. No checkpoint was saved with this step: the program goes on from the "
        f"newest one before, in {str(directory)!r}, if it is started again. Repair the cause first. If the weights "
        "were wrong before that, remove the newest of the directories ckpt-* there until it begins early enough."
    )
