"""Dense warm-up: the gradients of the first steps are sent uncompressed."""

from collections.abc import Sequence

import tensorflow as tf

from tfdist.compression.compressor import Compressor, Dense, InnerReduction, Payload, Reduced, State, Wrapper
from tfdist.compression.error_feedback import ErrorFeedback, pop_entry
from tfdist.compression.momentum_correction import MomentumCorrection
from tfdist.utils.argument_checks import check_whole_number


class WarmUp(Wrapper):
    """Sends the first `steps` gradients of a variable uncompressed, later ones with `compressor`.

    Gradients change fastest at the start of a training, when errors do the most harm (Lin et al. 2018, section 3.3;
    Tang et al. 2021, "1-bit Adam", whose variance needs exact gradients).
    """

    def __init__(self, compressor: Compressor, steps: int) -> None:
        """Wraps `compressor`; `steps` is a number of optimizer updates.

        Raises:
            ValueError: `steps` is not an integer of at least 0.
        """
        check_whole_number("steps", steps, at_least=0)
        self.compressor, self.steps = compressor, steps

    def initial_state(self, shape: Sequence[int]) -> State:
        return {"warm_up_steps": tf.zeros([], tf.int32), **self.compressor.initial_state(shape)}

    def uncompressed(self) -> "WarmUp":
        """Returns a compressor that sends everything that this one would send, uncompressed, and keeps its state."""
        inner = self.compressor
        if isinstance(inner, MomentumCorrection):
            return WarmUp(inner.uncompressed(), self.steps)
        return WarmUp(ErrorFeedback(Dense()) if isinstance(inner, ErrorFeedback) else Dense(), self.steps)

    def encode(self, gradient: tf.Tensor, state: State) -> tuple[Payload, State]:
        steps, inner = pop_entry(state, "warm_up_steps")
        payload, inner = self.compressor.encode(gradient, inner)
        return payload, {"warm_up_steps": steps + 1, **inner}

    def _reduce(
        self, gradients: Sequence[tf.Tensor], states: Sequence[State | None], reduce: InnerReduction
    ) -> Reduced:
        known = [state for state in states if state is not None]
        if not known:
            return reduce(self.compressor, gradients, states)
        inner_states = [None if state is None else pop_entry(state, "warm_up_steps")[1] for state in states]

        def reduce_by(compressor: Compressor) -> tuple[list[tf.Tensor], list[tf.Tensor], list[State], tf.Tensor]:
            reduced = reduce(compressor, gradients, inner_states)
            # Both branches must return the same tensors, so entries that a branch does not change are passed through.
            all_entries = [
                {name: tf.identity(new.get(name, value)) for name, value in (old or {}).items()}
                for old, new in zip(inner_states, reduced.states, strict=True)
            ]
            return reduced.sums, reduced.residuals, all_entries, reduced.finite

        sums, residuals, new_states, finite = tf.cond(
            known[0]["warm_up_steps"] < self.steps,
            lambda: reduce_by(self.uncompressed().compressor),
            lambda: reduce_by(self.compressor),
        )
        for old, new in zip(states, new_states, strict=True):
            if old is not None:
                new["warm_up_steps"] = old["warm_up_steps"] + 1
        return Reduced(list(sums), list(residuals), list(new_states), finite)
