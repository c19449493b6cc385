"""Applies what has been accumulated so far, though the micro-steps of an update are not complete."""

import tensorflow as tf

from tfdist.collectives import Exchange
from tfdist.keras_internals.accumulation import Accumulation
from tfdist.training.update import reduce_and_apply, reset


def flush(accumulation: Accumulation) -> int:
    """Makes an update of the mean over the micro-steps accumulated since the last one.

    To be called eagerly and on all workers, once tfdist makes the updates (`take_over`).

    Returns:
      How many micro-steps it was made of; 0 if there was nothing to apply.
    """
    micro_steps = accumulation.remainder
    if not micro_steps:
        return 0
    strategy = accumulation.strategy
    exchange = getattr(strategy, "gradient_exchange", None) or Exchange()

    def replica_flush() -> None:
        update = accumulation.update()
        accumulated = [tf.convert_to_tensor(accumulator) for accumulator in update.accumulators]
        reduce_and_apply(update, accumulated, exchange, contributes=None, micro_steps=micro_steps)
        reset(update)
        for variable in accumulation.constrained_variables:
            variable.assign(variable.constraint(variable))

    tf.function(lambda: strategy.run(replica_flush), autograph=False)()
    accumulation.complete()
    return micro_steps
