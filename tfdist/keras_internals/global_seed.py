"""Keras' global seed generator, from which everything draws that was given no seed."""

from typing import Any

from tfdist.private_symbols import private

_NAME = private("keras.src.random.seed_generator:GLOBAL_SEED_GENERATOR", "the name of the global seed generator")
_make = private("keras.src.random.seed_generator:global_seed_generator", "makes the global seed generator")
_get = private("keras.src.backend.common.global_state:get_global_attribute", "tells whether there is one")
_set = private("keras.src.backend.common.global_state:set_global_attribute", "takes it back")


def global_seed_generator() -> Any:
    """The generator, or `None` as long as nothing has drawn from it."""
    return _get(_NAME)


def make_global_seed_generator() -> None:
    """Makes the generator where it is missing, under the strategy in scope; this draws from Python's `random`."""
    _make()


def forget_global_seed_generator() -> None:
    """Takes the generator back, so that the next one who needs it makes a new one."""
    _set(_NAME, None)
