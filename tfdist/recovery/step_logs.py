"""The logs of a step, as they are saved."""

import contextlib
from collections.abc import Mapping
from typing import Any


def logs_to_save(logs: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Numbers as Python's, as Keras gives them to callbacks; the rest, such as a vector, as it is.

    >>> import numpy as np
    >>> logs_to_save({"loss": np.float32(0.5), "f1": np.ones([2])})
    {'loss': 0.5, 'f1': array([1., 1.])}
    """
    if logs is None:
        return None
    found = dict(logs)
    for name, value in logs.items():
        with contextlib.suppress(TypeError, ValueError):
            found[name] = float(value)
    return found
