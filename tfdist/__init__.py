"""Distribution strategies for Keras 3: `tf.distribute` with correct and fast training.

Change `tf.distribute.X` to `tfdist.strategies.X` and keep the rest of the program. `model.fit` then works on many
replicas and many workers, and computes what one process computes on the concatenated batch.

Sub-modules are imported on first use, so `import tfdist` does not import TensorFlow:

>>> import tfdist
>>> tfdist.__version__
'0.1.0'
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_SUBMODULES = tuple("callbacks checkpoint cluster collectives compression launch recovery strategies training".split())


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"tfdist.{name}")
    raise AttributeError(f"module 'tfdist' has no attribute {name!r}. Its sub-modules are {', '.join(_SUBMODULES)}.")


def __dir__() -> list[str]:
    return sorted([*globals(), *_SUBMODULES])
