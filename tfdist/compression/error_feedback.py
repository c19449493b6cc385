"""Error feedback: the residual of a step is added to the next gradient."""

from collections.abc import Sequence

import tensorflow as tf

from tfdist.compression.compressor import (
    Compressor,
    InnerReduction,
    Payload,
    Reduced,
    State,
    Wrapper,
    static_or_dynamic_shape,
)
from tfdist.compression.gradient_tensors import all_finite


class ErrorFeedback(Wrapper):
    """Adds the residual of the previous steps to each gradient, and keeps the part that `compressor` does not send.

    With the residual `e`, a replica sends `C(g + e)` and keeps `g + e - C(g + e)`. No part of a gradient is lost; some
    is sent in later steps. With a compressor that shrinks the error, SGD converges as fast as without compression
    (Stich and Karimireddy 2020, "The error-feedback framework"; Karimireddy et al. 2019). Over all replicas, the sums
    of all steps and the present residuals add up to all gradients.

    `Policy` wraps the methods that need error feedback. Memory: one float32 for each value.
    """

    def __init__(self, compressor: Compressor) -> None:
        """Wraps `compressor`."""
        self.compressor = compressor

    def initial_state(self, shape: Sequence[int]) -> State:
        return {"residual": tf.zeros(shape), **self.compressor.initial_state(shape)}

    def encode(self, gradient: tf.Tensor, state: State) -> tuple[Payload, State]:
        residual, inner = pop_entry(state, "residual")
        corrected = gradient + residual
        payload, inner = self.compressor.encode(corrected, inner)
        remainder = corrected - self.compressor.decode(payload, static_or_dynamic_shape(corrected))
        finite = all_finite([corrected])
        return payload, {"residual": tf.cond(finite, lambda: remainder, lambda: residual), **inner}

    def _reduce(
        self, gradients: Sequence[tf.Tensor], states: Sequence[State | None], reduce: InnerReduction
    ) -> Reduced:
        corrected, inner_states = list(gradients), list(states)
        for position, state in enumerate(states):
            if state is not None:
                residual, inner_states[position] = pop_entry(state, "residual")
                corrected[position] = gradients[position] + residual
        reduced = reduce(self.compressor, corrected, inner_states)
        new_states = [
            {} if state is None else {"residual": remainder, **new_state}
            for state, remainder, new_state in zip(states, reduced.residuals, reduced.states, strict=True)
        ]
        return Reduced(reduced.sums, [tf.zeros_like(g) for g in gradients], new_states, reduced.finite)


def pop_entry(state: State, name: str) -> tuple[tf.Tensor, State]:
    """Returns the entry `name` of a state, and a state of the other entries."""
    return state[name], {key: value for key, value in state.items() if key != name}
