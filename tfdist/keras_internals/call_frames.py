"""Frames of calls: whether Keras' `fit`, or another method of an object, has called what runs."""

import inspect
import sys
from collections.abc import Iterator
from itertools import islice
from types import CodeType, FrameType
from typing import Any

import keras

_FIT = inspect.unwrap(keras.Model.fit).__code__
_OTHERS = tuple(inspect.unwrap(method).__code__ for method in (keras.Model.evaluate, keras.Model.predict))
_WRAPPERS = 8  # more than there are around the list of callbacks


def is_within_call_of_fit(model: Any) -> bool:
    """Whether `fit` of a model has called the caller, or the wrappers around it."""
    for frame in islice(callers(sys._getframe(1)), _WRAPPERS):
        if is_call(frame, _FIT, model):
            return True
        if any(is_call(frame, code, model) for code in _OTHERS):  # which a callback of `fit` may call
            return False
    return False


def callers(frame: FrameType | None) -> Iterator[FrameType]:
    """Yields a frame and those that have called it, the outermost last."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_call(frame: FrameType, code: CodeType, owner: Any) -> bool:
    """Whether `frame` runs `code` as a method of `owner`."""
    return frame.f_code is code and code.co_argcount > 0 and frame.f_locals.get(code.co_varnames[0]) is owner
