"""Compressors that change what another one encodes: error feedback, momentum correction, dense warm-up."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from tfdist.compression.compressor import Compressor, Dense, Group, Payload, Reduced, State
from tfdist.compression.gradient_tensors import all_finite
from tfdist.compression.owned_parts import OwnedParts
from tfdist.compression.sparsification import RandomK, TopK
from tfdist.utils.argument_checks import check_whole_number

# Takes a compressor, and the gradients and states that a wrapper has changed.
InnerReduction = Callable[[Compressor, Sequence[tf.Tensor], Sequence[State | None]], Reduced]


class Wrapper(Compressor):
    """Base of compressors that change what another one, `compressor`, encodes, but not how.

    A subclass defines `encode` and `_reduce`.
    """

    compressor: Compressor

    def reduce(self, gradients: Sequence[tf.Tensor], group: Group, states: Sequence[State | None]) -> Reduced:
        return self._reduce(gradients, states, lambda method, *given: method.reduce(given[0], group, given[1]))

    def reduce_parts(
        self, gradients: Sequence[tf.Tensor], group: Group, states: Sequence[State | None], parts: OwnedParts
    ) -> Reduced:
        return self._reduce(
            gradients, states, lambda method, *given: method.reduce_parts(given[0], group, given[1], parts)
        )

    @abstractmethod
    def _reduce(
        self, gradients: Sequence[tf.Tensor], states: Sequence[State | None], reduce: InnerReduction
    ) -> Reduced:
        """Changes gradients and states, and reduces them by `reduce`."""

    @property
    def encodes_rows(self) -> bool:
        return self.compressor.encodes_rows

    def payload_bytes(self, shape: Sequence[int]) -> int:
        return self.compressor.payload_bytes(shape)

    def decode(self, payload: Mapping[str, tf.Tensor], shape: Sequence[int]) -> tf.Tensor:
        return self.compressor.decode(payload, shape)


class _Residual(Wrapper):
    """Base of wrappers that keep what `compressor` does not send of each gradient."""

    @abstractmethod
    def _accumulated(self, gradient: tf.Tensor, state: State) -> tuple[tf.Tensor, tf.Tensor | None, State]:
        """Returns what is to be sent, the velocity if there is one, and the state of `compressor`."""

    def _kept(self, total: tf.Tensor, remainder: tf.Tensor, velocity: tf.Tensor | None) -> State:
        """Returns the new entries of this wrapper after `compressor` has left out `remainder` of `total`."""
        del total, velocity
        return {"residual": remainder}

    def encode(self, gradient: tf.Tensor, state: State) -> tuple[Payload, State]:
        total, velocity, inner = self._accumulated(gradient, state)
        payload, inner = self.compressor.encode(total, inner)
        remainder = total - self.compressor.decode(payload, _shape_of(total))
        new_state = {**self._kept(total, remainder, velocity), **inner}
        entries = tf.cond(
            all_finite([total]),
            lambda: [new_state[name] for name in state],
            lambda: [tf.identity(state[name]) for name in state],
        )
        return payload, dict(zip(state, entries, strict=True))

    def _reduce(
        self, gradients: Sequence[tf.Tensor], states: Sequence[State | None], reduce: InnerReduction
    ) -> Reduced:
        totals, inner_states = list(gradients), list(states)
        velocities: dict[int, tf.Tensor | None] = {}
        for position, state in enumerate(states):
            if state is not None:
                accumulated = self._accumulated(gradients[position], state)
                totals[position], velocities[position], inner_states[position] = accumulated
        reduced = reduce(self.compressor, totals, inner_states)
        new_states: list[State] = [{} for _ in gradients]
        for position, velocity in velocities.items():
            entries = self._kept(totals[position], reduced.residuals[position], velocity)
            new_states[position] = {**entries, **reduced.states[position]}
        return Reduced(reduced.sums, [tf.zeros_like(g) for g in gradients], new_states, reduced.finite)


class ErrorFeedback(_Residual):
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

    def _accumulated(self, gradient: tf.Tensor, state: State) -> tuple[tf.Tensor, tf.Tensor | None, State]:
        residual, inner = _pop_entry(state, "residual")
        return gradient + residual, None, inner


class MomentumCorrection(_Residual):
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

    def _accumulated(self, gradient: tf.Tensor, state: State) -> tuple[tf.Tensor, tf.Tensor | None, State]:
        residual, other_entries = _pop_entry(state, "residual")
        velocity, inner = _pop_entry(other_entries, "velocity")
        if self.clipnorm is not None:
            gradient = tf.clip_by_norm(gradient, self.clipnorm)
        velocity = self.momentum * velocity + gradient
        return residual + velocity, velocity, inner

    def _kept(self, total: tf.Tensor, remainder: tf.Tensor, velocity: tf.Tensor | None) -> State:
        if isinstance(self.compressor, Dense):  # The dense warm-up uses plain momentum.
            return {"residual": remainder, "velocity": velocity}
        unsent = tf.equal(remainder, total)
        return {"residual": remainder, "velocity": tf.where(unsent, velocity, tf.zeros_like(velocity))}

    def uncompressed(self) -> "MomentumCorrection":
        """Returns the same momentum and clipping, with all values sent."""
        return MomentumCorrection(Dense(), self.momentum, self.clipnorm)


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
        steps, inner = _pop_entry(state, "warm_up_steps")
        payload, inner = self.compressor.encode(gradient, inner)
        return payload, {"warm_up_steps": steps + 1, **inner}

    def _reduce(
        self, gradients: Sequence[tf.Tensor], states: Sequence[State | None], reduce: InnerReduction
    ) -> Reduced:
        known = [state for state in states if state is not None]
        if not known:
            return reduce(self.compressor, gradients, states)
        inner_states = [None if state is None else _pop_entry(state, "warm_up_steps")[1] for state in states]

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


def _pop_entry(state: State, name: str) -> tuple[tf.Tensor, State]:
    """Returns the entry `name` of a state, and a state of the other entries."""
    return state[name], {key: value for key, value in state.items() if key != name}


def _shape_of(tensor: tf.Tensor) -> "Sequence[int] | tf.Tensor":
    """Returns the shape of `tensor` for `decode`: the static shape if it is known, else a tensor."""
    return tensor.shape if tensor.shape.is_fully_defined() else tf.shape(tensor)
