"""Keras' seed generators: different random numbers on each replica, and the global generator."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.keras_internals.keras_symbols import global_attribute
from tfdist.patches import patch, replace
from tfdist.private_symbols import private
from tfdist.strategy_hooks import hooks_of

_GLOBAL_NAME = private(
    "keras.src.random.seed_generator:GLOBAL_SEED_GENERATOR",
    "the name of the global seed generator",
    since="3.13",
    before="global_seed_generator",
)
_create_global = private("keras.src.random.seed_generator:global_seed_generator", "creates the global seed generator")
_set_global = private("keras.src.backend.common.global_state:set_global_attribute", "removes the global seed generator")

_STRIDE = 0x9E3779B1  # odd, so that replicas differ in many bits (Knuth's multiplicative hashing)


@patch
def patch_seed_generators() -> None:
    """Makes Keras' seed generators draw different seeds on each replica, or in each micro-batch.

    The state of a generator is equal on all replicas, and stays so; without this patch every replica would drop the
    same units of its samples. The first replica draws the seeds of one process.
    """
    draw = keras.random.SeedGenerator.next

    @replace(keras.random.SeedGenerator, "next")
    def draw_for_replica(self: Any, ordered: bool = True) -> Any:
        seed = draw(self, ordered)
        part = None if tf.distribute.in_cross_replica_context() else hooks_of(tf.distribute.get_strategy()).part
        if part is None:
            return seed
        number = part()
        known = tf.get_static_value(number)
        if known is not None:
            static_offset = np.array([int(known) * _STRIDE % 2**32, 0], np.uint32).astype(seed.dtype.as_numpy_dtype)
            return seed + static_offset if known else seed
        replica = tf.cast(number, tf.uint32)
        offset = tf.stack([replica * tf.constant(_STRIDE, tf.uint32), tf.constant(0, tf.uint32)])
        return seed + tf.cast(offset, seed.dtype)


def global_seed_generator() -> Any:
    """Returns the global generator; `None` if nothing has drawn from it yet."""
    return global_attribute(_GLOBAL_NAME)


def make_global_seed_generator() -> None:
    """Creates the global generator if it is missing, under the strategy in scope; draws from Python's `random`."""
    _create_global()


def forget_global_seed_generator() -> None:
    """Deletes the global generator, so that its next user creates a new one."""
    _set_global(_GLOBAL_NAME, None)
