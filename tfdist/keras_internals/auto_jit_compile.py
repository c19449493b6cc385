"""`jit_compile="auto"` under a strategy: XLA compiles the steps of a model where a plan says so, or by a rule."""

from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.keras_symbols import TensorFlowTrainer, supports_jit
from tfdist.patches import patch, replace
from tfdist.strategy_hooks import has_hooks
from tfdist.tensorflow_internals.xla_functions import compiles_on_cpus

# The steps of smaller models take a few milliseconds, and compiling takes seconds.
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


@patch
def patch_auto_jit_compile() -> None:
    """Makes `jit_compiles` decide on models that are compiled with "auto" under tfdist's strategies."""
    resolve, get_config = TensorFlowTrainer._resolve_auto_jit_compile, TensorFlowTrainer.get_compile_config

    @replace(TensorFlowTrainer, "_resolve_auto_jit_compile")
    def resolve_later(self: Any) -> Any:
        return _Auto() if has_hooks(self.distribute_strategy) else resolve(self)

    @replace(TensorFlowTrainer, "get_compile_config")
    def get_config_with_auto(self: Any) -> dict[str, Any]:
        config = get_config(self)
        return {**config, "jit_compile": "auto"} if config and isinstance(self.jit_compile, _Auto) else config


def jit_compiles(model: Any, data: Any = None) -> bool:
    """Whether XLA is to compile the steps of a built model: as `compile` says, for "auto" where it pays.

    Under a strategy of `tfdist.strategies.planned()` the plan decides, for which steps of the program were measured.
    Without a plan, by `benchmarks/xla.py`, it pays on CPUs for models with attention and without convolutions, of at
    least a million trainable parameters. On GPUs nothing was measured. It never pays if the samples of `data`, a batch,
    have no fixed shape: XLA compiles every shape by itself, for seconds.
    """
    if not isinstance(model.jit_compile, _Auto):
        return bool(model.jit_compile)
    shapes = [leaf.shape for leaf in tf.nest.flatten(data, expand_composites=True) if isinstance(leaf, tf.Tensor)]
    if any(shape.rank is None or None in shape.as_list()[1:] for shape in shapes):
        return False
    if not compiles_on_cpus() or not supports_jit(model):
        return False
    plan = model.distribute_strategy.plan
    if plan is not None:
        return bool(plan.jit_compile)
    layers = model._flatten_layers()
    kinds = {kind for layer in layers for kind in (_ATTENTION, _SLOWER) if isinstance(layer, kind)}
    return kinds == {_ATTENTION} and sum(map(_size, model.trainable_variables)) >= _MIN_PARAMETERS


def jit_compiles_on_workers(model: Any) -> bool:
    """Whether XLA is to compile what workers of parameter servers compute: as `compile` says; for "auto", as a plan.

    Without a plan "auto" compiles nothing, as in Keras under parameter servers.
    """
    if not isinstance(model.jit_compile, _Auto):
        return bool(model.jit_compile)
    plan = model.distribute_strategy.plan
    return plan is not None and bool(plan.jit_compile) and supports_jit(model)


def rejects_xla(model: Any) -> bool:
    """Whether the user has compiled the model with `jit_compile=False`."""
    return not model.jit_compile and not isinstance(model.jit_compile, _Auto)


def _size(variable: keras.Variable) -> int:
    return tf.TensorShape(variable.shape).num_elements() or 0
