"""`jit_compile="auto"` under a strategy: XLA compiles the steps of a model where that was measured to pay."""

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.keras_symbols import TensorFlowTrainer, supports_jit

# Below it steps take a few milliseconds, and compiling takes seconds.
_MIN_PARAMETERS = 1_000_000
_ATTENTION = (
    keras.layers.MultiHeadAttention,
    keras.layers.GroupQueryAttention,
    keras.layers.Attention,
    keras.layers.AdditiveAttention,
)
_SLOWER = tuple(getattr(keras.layers, name) for name in dir(keras.layers) if "Conv" in name)


class _Auto(int):
    """What a model keeps for "auto". It is false, so Keras compiles nothing."""


def patch_auto_jit_compile(is_ours: Callable[[Any], bool]) -> None:
    """Makes `jit_compiles` decide on models that are compiled with "auto" and whose strategy `is_ours`."""
    resolve = TensorFlowTrainer._resolve_auto_jit_compile

    @functools.wraps(resolve)
    def resolve_later(self: Any) -> Any:
        return _Auto() if is_ours(self.distribute_strategy) else resolve(self)

    TensorFlowTrainer._resolve_auto_jit_compile = resolve_later


def jit_compiles(model: Any) -> bool:
    """Whether XLA is to compile the steps of a built model: as `compile` says, and for "auto", where it pays.

    By `benchmarks/xla.py` it pays on CPUs for models with attention and without convolutions, of at least a million
    trainable parameters. On GPUs nothing was measured.
    """
    if not isinstance(model.jit_compile, _Auto):
        return bool(model.jit_compile)
    if any(device.device_type != "CPU" for device in tf.config.list_logical_devices()) or not supports_jit(model):
        return False
    layers = model._flatten_layers()
    kinds = {kind for layer in layers for kind in (_ATTENTION, _SLOWER) if isinstance(layer, kind)}
    return kinds == {_ATTENTION} and sum(map(_size, model.trainable_variables)) >= _MIN_PARAMETERS


def _size(variable: keras.Variable) -> int:
    return tf.TensorShape(variable.shape).num_elements() or 0
