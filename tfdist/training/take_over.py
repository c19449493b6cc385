"""Updates by tfdist's rules under strategies that are not tfdist's, for optimizers that are to accumulate gradients."""

import weakref
from typing import Any

from tfdist.collectives import Exchange
from tfdist.keras_internals.accumulation import Accumulation
from tfdist.keras_internals.optimizers import OptimizerUpdate, install_update_of
from tfdist.training.update import once_for_all_micro_batches, update_over_replicas

_taken_over: weakref.WeakSet[Any] = weakref.WeakSet()
_installed = False


def take_over(accumulation: Accumulation) -> None:
    """Has `update_over_replicas` make the updates of a model's optimizer, from its next step on and for good.

    Keras' own accumulation cannot run on the replicas of TensorFlow's strategies, evaluates schedules by micro-steps,
    and averages the weights in every one. Nothing is done under tfdist's strategies, where that is so anyway.
    """
    if hasattr(accumulation.strategy, "gradient_exchange") or _is_taken_over(accumulation.optimizers[0]):
        return
    _install_once()
    _taken_over.update(accumulation.optimizers)
    accumulation.leave_to_tfdist()


def _is_taken_over(optimizer: Any) -> bool:
    return optimizer in _taken_over


def _update(optimizer: OptimizerUpdate, gradients: list[Any]) -> None:
    update_over_replicas(optimizer, gradients, Exchange())


def _install_once() -> None:
    global _installed
    if not _installed:
        install_update_of(_is_taken_over, _update, once_for_all_micro_batches)
        _installed = True
