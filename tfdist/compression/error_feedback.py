"""Error feedback: what a method has not delivered is added to the next gradient."""

from collections.abc import Mapping, Sequence

import tensorflow as tf

from tfdist.compression.compressor import Compressor, Payload, Reduced, State, all_finite, shape_of
from tfdist.compression.group import Group


class ErrorFeedback(Compressor):
    """Adds to each gradient the residual of the steps before, and keeps what `compressor` then does not deliver.

    With the residual `e`, a replica delivers `C(g + e)` and keeps `g + e - C(g + e)`. Nothing of a gradient is lost,
    it comes later; for compressors that shrink the error, SGD then converges as fast as without compression (Stich and
    Karimireddy 2020, "The error-feedback framework"; Karimireddy et al. 2019). Over all replicas, what has been
    delivered and the residuals add up to all gradients so far.

    Wraps the methods that need it where nobody asks for anything else; memory: one float32 a value.
    """

    def __init__(self, compressor: Compressor) -> None:
        """Wraps `compressor`."""
        self.compressor = compressor

    @property
    def encodes_rows(self) -> bool:
        return self.compressor.encodes_rows

    def initial_state(self, shape: Sequence[int]) -> State:
        return {"residual": tf.zeros(shape), **self.compressor.initial_state(shape)}

    def payload_bytes(self, shape: Sequence[int]) -> int:
        return self.compressor.payload_bytes(shape)

    def encode(self, gradient: tf.Tensor, state: State) -> tuple[Payload, State]:
        residual, inner = take(state, "residual")
        corrected = gradient + residual
        payload, inner = self.compressor.encode(corrected, inner)
        remainder = corrected - self.compressor.decode(payload, shape_of(corrected))
        finite = all_finite([corrected])
        return payload, {"residual": tf.cond(finite, lambda: remainder, lambda: residual), **inner}

    def decode(self, payload: Mapping[str, tf.Tensor], shape: Sequence[int]) -> tf.Tensor:
        return self.compressor.decode(payload, shape)

    def reduce(self, gradients: Sequence[tf.Tensor], group: Group, states: Sequence[State | None]) -> Reduced:
        corrected, inner_states = list(gradients), list(states)
        for position, state in enumerate(states):
            if state is not None:
                residual, inner_states[position] = take(state, "residual")
                corrected[position] = gradients[position] + residual
        reduced = self.compressor.reduce(corrected, group, inner_states)
        new_states = [
            {} if state is None else {"residual": remainder, **new_state}
            for state, remainder, new_state in zip(states, reduced.remainders, reduced.states, strict=True)
        ]
        return Reduced(reduced.sums, [tf.zeros_like(g) for g in gradients], new_states, reduced.finite)


def take(state: State, name: str) -> tuple[tf.Tensor, State]:
    """The entry `name` of a state, and the others."""
    return state[name], {other: value for other, value in state.items() if other != name}
