"""Momentum correction and local clipping: deep gradient compression."""

from collections.abc import Sequence

import tensorflow as tf

from tfdist.compression.compressor import (
    Compressor,
    Dense,
    InnerReduction,
    Payload,
    Reduced,
    State,
    Wrapper,
    static_or_dynamic_shape,
)
from tfdist.compression.error_feedback import pop_entry
from tfdist.compression.gradient_tensors import all_finite
from tfdist.compression.sparsification import RandomK, TopK


class MomentumCorrection(Wrapper):
    """Momentum before sparsification (deep gradient compression), for plain `SGD` without momentum.

    A sparsifier with error feedback sends a value only in some steps, so an optimizer's momentum would act on delayed
    values. Here each replica keeps the velocity, `u = momentum * u + g`, adds it to the residual, `v = v + u`, sends
    the largest values of `v`, and sets both to zero at the positions that it has sent (momentum factor masking). With
    `clipnorm`, it first clips its gradient of each variable (local gradient clipping). Lin et al. 2018, "Deep gradient
    compression", sections 3.1 to 3.3.

    Memory: two float32 for each value.
    """

    def __init__(self, compressor: Compressor, momentum: float = 0.9, clipnorm: float | None = None) -> None:
        """Wraps `compressor`, a `TopK` or `RandomK` without error feedback.

        Args:
            compressor: The sparsifier.
            momentum: At least 0 and below 1.
            clipnorm: The largest norm of a replica's gradient of a variable, which is its part of the mean over N
                replicas. No clipping if `None`. The paper uses `1 / sqrt(N)` of the threshold for the full gradient.

        Raises:
            ValueError: An argument is invalid.
        """
        if not isinstance(compressor, TopK | RandomK | Dense):
            raise ValueError(
                f"Momentum correction needs a method that sends a part of the values. Received: {compressor!r}. "
                "Expected: TopK(...) or RandomK(...), not wrapped. With other methods use the optimizer's momentum."
            )
        if isinstance(momentum, bool) or not 0 <= momentum < 1:
            raise ValueError(f"Invalid `momentum`. Received: {momentum!r}. Expected: at least 0 and below 1.")
        if clipnorm is not None and not clipnorm > 0:
            raise ValueError(f"Invalid `clipnorm`. Received: {clipnorm!r}. Expected: a number above 0, or None.")
        self.compressor, self.momentum, self.clipnorm = compressor, float(momentum), clipnorm

    def initial_state(self, shape: Sequence[int]) -> State:
        zeros = tf.zeros(shape)
        return {"residual": zeros, "velocity": zeros, **self.compressor.initial_state(shape)}

    def encode(self, gradient: tf.Tensor, state: State) -> tuple[Payload, State]:
        velocity, total, inner = self._accumulated(gradient, state)
        payload, inner = self.compressor.encode(total, inner)
        remainder = total - self.compressor.decode(payload, static_or_dynamic_shape(total))
        new_state = {**self._kept(total, remainder, velocity), **inner}
        finite = all_finite([total])
        entries = tf.cond(
            finite, lambda: [new_state[name] for name in state], lambda: [tf.identity(state[name]) for name in state]
        )
        return payload, dict(zip(state, entries, strict=True))

    def _reduce(
        self, gradients: Sequence[tf.Tensor], states: Sequence[State | None], reduce: InnerReduction
    ) -> Reduced:
        totals, inner_states = list(gradients), list(states)
        velocities: dict[int, tf.Tensor] = {}
        for position, state in enumerate(states):
            if state is not None:
                accumulated = self._accumulated(gradients[position], state)
                velocities[position], totals[position], inner_states[position] = accumulated
        reduced = reduce(self.compressor, totals, inner_states)
        new_states: list[State] = [{} for _ in gradients]
        for position, velocity in velocities.items():
            entries = self._kept(totals[position], reduced.residuals[position], velocity)
            new_states[position] = {**entries, **reduced.states[position]}
        return Reduced(reduced.sums, [tf.zeros_like(g) for g in gradients], new_states, reduced.finite)

    def _accumulated(self, gradient: tf.Tensor, state: State) -> tuple[tf.Tensor, tf.Tensor, State]:
        residual, other_entries = pop_entry(state, "residual")
        velocity, inner = pop_entry(other_entries, "velocity")
        if self.clipnorm is not None:
            gradient = tf.clip_by_norm(gradient, self.clipnorm)
        velocity = self.momentum * velocity + gradient
        return velocity, residual + velocity, inner

    def _kept(self, total: tf.Tensor, remainder: tf.Tensor, velocity: tf.Tensor) -> State:
        if isinstance(self.compressor, Dense):  # The dense warm-up uses plain momentum.
            return {"residual": remainder, "velocity": velocity}
        unsent = tf.equal(remainder, total)
        return {"residual": remainder, "velocity": tf.where(unsent, velocity, tf.zeros_like(velocity))}

    def uncompressed(self) -> "MomentumCorrection":
        """Returns the same momentum and clipping, with all values sent."""
        return MomentumCorrection(Dense(), self.momentum, self.clipnorm)
