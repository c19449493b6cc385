"""Builds Keras models from the shapes that a dataset declares, without drawing a batch; checks before that."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.keras_symbols import TensorFlowTrainer
from tfdist.keras_internals.model_introspection import has_own_step
from tfdist.patches import patch, replace
from tfdist.strategy_hooks import has_hooks, hooks_of
from tfdist.tensorflow_internals.input_pipeline import type_of_first_part
from tfdist.tensorflow_internals.rows_per_replica import batch_spec

_BUILD_ERRORS = (ValueError, TypeError, RuntimeError)


def declared_batch(element_spec: Any) -> Any:
    """Returns a replica's batch as symbolic tensors.

    Raises:
        AttributeError, TypeError, ValueError: If the rank of a part is unknown.

    >>> declared_batch(tf.TensorSpec([None, 3]))
    <KerasTensor shape=(None, 3), dtype=float32, sparse=False, ragged=False, name=...>
    """

    def symbolic(spec: Any) -> Any:
        spec = type_of_first_part(spec)
        if isinstance(spec, tf.OptionalSpec) or not hasattr(spec, "shape"):
            return None  # a dataset without targets or weights
        return keras.KerasTensor(tuple(spec.shape), spec.dtype.name)

    return tf.nest.map_structure(symbolic, element_spec)


def build_for_training(model: Any, element_spec: Any = None) -> None:
    """Creates the missing variables of the model, its metrics and its optimizer, as Keras would.

    Without a strategy Keras creates them only when it traces the first step.

    Args:
        model: A compiled Keras model.
        element_spec: The structure of `tf.TypeSpec`s of its batches, `(inputs, targets)` or with sample weights: the
            `element_spec` of a `tf.data.Dataset` or of a distributed one.

    Raises:
        RuntimeError: If the model, its losses or its metrics are not built, and the shapes of a batch are unknown.
    """
    if _lacks_call(model):
        _build_without_call(model)
        return
    parts = [model._compile_metrics, model._compile_loss]
    needs_shapes = not all(layer.built for layer in model._flatten_layers()) or not all(
        part is None or part.built for part in parts
    )
    batch = None
    if needs_shapes:
        try:
            if element_spec is None:
                raise ValueError("no element_spec")
            batch = declared_batch(element_spec)
        except (AttributeError, TypeError, ValueError) as error:
            raise RuntimeError(
                "The variables of the model or its metrics cannot be created before the first batch. Received: batches "
                f"of {element_spec}. Expected: tensors of known rank. Build the model by calling it on a batch, and "
                "train from data with known shapes (`tf.ensure_shape` in a `map`)."
            ) from error
    try:
        with model.distribute_strategy.scope():
            model._symbolic_build(data_batch=batch)
    except _BUILD_ERRORS:
        if not has_own_step(model):
            raise
        _build_without_call(model)


class LateMetrics:
    """The metrics and loss trackers of a compiled model that Keras creates in the first step, from its results."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @property
    def exist_later(self) -> bool:
        """Whether some do not exist yet."""
        return bool(self._unbuilt)

    def call_when_created(self, function: Callable[[], None]) -> None:
        """Calls `function` whenever Keras has created some of them, before they are used, unless they are reset before.

        That is while it traces a step, or before it if there is a strategy: then they exist after `_symbolic_build`.
        Only the last `function` is called.
        """
        model, waiting = self._model, [function]
        for part in self._unbuilt:
            _call_after(part, "build", functools.partial(_call_if_it_has_values, part, waiting))
        if self._unbuilt:
            _call_after(model, "_symbolic_build", lambda: [one() for one in waiting])
            # `train_on_batch` resets all metrics before it traces its step.
            _call_after(model._loss_tracker, "reset_state", waiting.clear)

    @property
    def _unbuilt(self) -> list[Any]:
        parts = [getattr(self._model, name, None) for name in ("_compile_metrics", "_compile_loss")]
        return [part for part in parts if part is not None and not part.built]


def _call_if_it_has_values(part: Any, functions: Sequence[Callable[[], None]]) -> None:
    if all(variable._value is not None for variable in part.variables):  # no symbols, as within `_symbolic_build`
        for function in functions:
            function()


def _call_after(owner: Any, name: str, function: Callable[[], Any]) -> None:
    """Calls `function` outside of graphs after the next call of a method of this object."""
    method = getattr(type(owner), name)

    def call(*args: Any, **kwargs: Any) -> Any:
        vars(owner).pop(name, None)
        result = method(owner, *args, **kwargs)
        with tf.init_scope():
            function()
        return result

    vars(owner)[name] = call  # bypasses Keras' tracking of attributes


@patch
def add_early_check(check: Callable[[Any, Any], None]) -> None:
    """Calls `check(strategy, dataset)` when `fit` or `evaluate` starts. Adding the same check again has no effect.

    The dataset is distributed if the strategy does so. Keras calls callbacks only after it has built the model from a
    batch, which fails under strategies that it does not support.
    """
    build = TensorFlowTrainer._maybe_symbolic_build

    @replace(TensorFlowTrainer, "_maybe_symbolic_build")
    def check_and_build(self: Any, iterator: Any = None, data_batch: Any = None) -> Any:
        if iterator is not None:
            check(self.distribute_strategy, iterator._distributed_dataset)
        return build(self, iterator=iterator, data_batch=data_batch)


@patch
def patch_symbolic_build() -> None:
    """Makes Keras build models from the shapes that a dataset declares.

    Keras draws a batch and averages it over all replicas only to learn its shapes. That fails for strings and for an
    uneven first batch, sends a batch over the network, advances a seeded shuffle, so that the samples come in another
    order than in one process, and leaves a second iterator behind that writes the same `Dataset.cache` as the one in
    use.
    """
    build = TensorFlowTrainer._maybe_symbolic_build

    @replace(TensorFlowTrainer, "_maybe_symbolic_build")
    def build_from_shapes(self: Any, iterator: Any = None, data_batch: Any = None) -> Any:
        strategy = self.distribute_strategy
        is_ours = has_hooks(strategy)
        if iterator is not None:
            _check_has_end(iterator)
        if is_ours and _lacks_call(self):
            return _build_without_call(self)
        steps_by_itself = is_ours and has_own_step(self)
        declared = _declared_batch_of(iterator) if iterator is not None and is_ours else None
        if declared is not None:
            try:
                with strategy.scope():
                    return self._symbolic_build(data_batch=declared)
            except _BUILD_ERRORS:
                if steps_by_itself:
                    return _build_without_call(self)
                # Given a batch, Keras either builds or raises the error that the user should see.
        try:
            with hooks_of(strategy).local_values(strategy):  # as Keras draws a batch
                return build(self, iterator=iterator, data_batch=data_batch)
        except _BUILD_ERRORS as error:
            if steps_by_itself:
                return _build_without_call(self)
            rows = next((leaf.shape[0] for leaf in keras.tree.flatten(declared) if leaf is not None), None)
            if rows is not None:
                strategy.divided_rows.of([rows], strategy.num_replicas_in_sync).explain(error)
            raise


def _lacks_call(model: Any) -> bool:
    """Whether a model cannot be called, because its `train_step` calls its parts."""
    return type(model).call is keras.Model.call


def _build_without_call(model: Any) -> None:
    """Builds the optimizer of a model that a batch cannot build, if its weights exist. A step builds the rest."""
    optimizer = model.optimizer
    layers = model._flatten_layers(include_self=False)
    if optimizer is not None and not optimizer.built and all(layer.built for layer in layers):
        with model.distribute_strategy.scope():
            optimizer.build(model.trainable_variables)


def _check_has_end(iterator: Any) -> None:
    if getattr(iterator.data_adapter, "is_drawn_by_workers", False) and iterator.steps_per_epoch is None:
        raise ValueError(
            "A dataset that workers create has no end. Received: steps_per_epoch=None. Expected: the number of steps "
            "of an epoch. Give `fit` a `steps_per_epoch`."
        )


def _declared_batch_of(iterator: Any) -> Any:
    """Returns a replica's batch as symbolic tensors, or `None` if a rank is unknown."""
    try:
        return declared_batch(batch_spec(iterator._distributed_dataset))
    except (AttributeError, TypeError, ValueError):
        return None
