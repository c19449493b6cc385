"""The callbacks of the list in which a callback stands; Keras does not show it the list."""

import inspect

import keras


def callbacks_beside(callback: keras.callbacks.Callback) -> list[keras.callbacks.Callback]:
    """The list that is calling `callback`, in its order, with `callback` itself; empty where no list calls it."""
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, keras.callbacks.CallbackList) and callback in caller.callbacks:
            return list(caller.callbacks)
        frame = frame.f_back
    return []
