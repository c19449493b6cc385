"""Every compressor between columns in one graph: what separate replicas compute."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from methods import KINDS, METHODS
from replica_threads import on_replicas

from tfdist.compression import Compressor, Dense, ErrorFeedback, Group, MomentumCorrection, TopK, WarmUp
from tfdist.pipeline.column_reduction import ColumnGroup
from tfdist.pipeline.device_program import DeviceProgram

pytestmark = pytest.mark.usefixtures("cpus")
SHAPES = [(33, 65), (40, 40), (7,)]  # the last one is sent uncompressed


def gradients_of(column: int, step: int) -> list[np.ndarray]:
    """Of unequal magnitudes, so that a column that is left out or counted twice shows."""
    rng = np.random.default_rng(10 * step + column)
    return [rng.normal(size=shape).astype("float32") * (column + 1) for shape in SHAPES]


def reduction(compressor: Compressor) -> Any:
    def reduce(group: Group, gradients: Any, states: Any) -> Any:
        reduced = compressor.reduce(gradients, group, [*states, None])
        return reduced.sums, reduced.states[:-1], reduced.finite

    return reduce


def on_columns(compressor: Compressor, count: int, steps: int) -> list[list[Any]]:
    """Returns by step and column what a program returns."""
    specs = [
        [tf.TensorSpec(shape) for shape in SHAPES],
        tf.nest.map_structure(lambda one: tf.TensorSpec(one.shape, one.dtype), initial(compressor)),
    ]
    devices = [f"CPU:{column}" for column in range(count)]

    @tf.function(autograph=False)
    def step(arguments: Any) -> Any:
        reduce = reduction(compressor)
        program = DeviceProgram(lambda *given: (reduce(*given), []), specs, count, ColumnGroup)
        return program.forward(arguments, devices)[0]

    states, results = [initial(compressor)] * count, []
    for number in range(steps):
        columns = step([[gradients_of(column, number), states[column]] for column in range(count)])
        states = [state for _, state, _ in columns]
        results.append(tf.nest.map_structure(lambda tensor: tensor.numpy(), columns))
    return results


def initial(compressor: Compressor) -> list[dict[str, tf.Tensor]]:
    return [compressor.initial_state(shape) for shape in SHAPES[:-1]]


# Two columns exchange the payloads of blocks in one phase, as any number does those of chosen values. The others go the
# ways of casts, blocks and chosen values.
_OTHERS = {"fp8", "qsgd", "randomk 0.3"}


@pytest.mark.parametrize(
    ("name", "count"),
    [
        *(pytest.param(name, 3, marks=pytest.mark.long if name in _OTHERS else []) for name in [*KINDS, "momentum"]),
        *(pytest.param(name, 2, marks=[] if name == "int4" else pytest.mark.long) for name in [*KINDS, "momentum"]),
    ],
)
def test_columns_compute_what_replicas_compute(name: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    compressor: Compressor = MomentumCorrection(TopK(0.1, 64), 0.9, 5.0)
    if name != "momentum":
        compressor = ErrorFeedback(METHODS[name])
    if name == "qsgd":  # whose seeds differ in the last bit
        monkeypatch.setattr(tf.random, "stateless_uniform", lambda shape, seed: tf.fill(shape, 0.25))

    def run(group: Group, column: int) -> Any:
        states, results = initial(compressor), []
        for number in range(2):
            own = [tf.constant(gradient) for gradient in gradients_of(column, number)]
            sums, states, finite = reduction(compressor)(group, own, states)
            results.append((sums, states, finite))
        return results

    expected, _ = on_replicas(count, run)
    for number, columns in enumerate(on_columns(compressor, count, 2)):
        for column, (sums, states, finite) in enumerate(columns):
            assert finite
            for ours, first in zip(sums, columns[0][0], strict=True):
                np.testing.assert_array_equal(ours, first, "columns differ")
            others, other_states, _ = expected[column][number]
            for ours, one in zip(
                [*sums, *map(of_any_sign, states)], [*others, *map(of_any_sign, other_states)], strict=True
            ):
                # Sums of a few float32 of up to 20 in another order; the low rank approximation is a product of them,
                # and a value on a tie may be rounded the other way.
                differing = ~np.isclose(ours, one, rtol=1e-4, atol=1e-4)
                assert np.count_nonzero(differing) <= 2


def of_any_sign(state: dict[str, Any]) -> np.ndarray:
    """Returns the values of a state. The columns of a factor are eigenvectors, whose sign is that of a rounding."""
    values = [np.abs(value) if name == "factor" else value for name, value in sorted(state.items())]
    return np.concatenate([np.ravel(value) for value in values])


def test_a_compressor_may_hold_a_tensor() -> None:
    class Scaled(Dense):
        def __init__(self) -> None:
            self.scale = tf.constant(2.0)

        def reduce(self, gradients: Any, group: Group, states: Any) -> Any:
            return super().reduce([gradient * self.scale for gradient in gradients], group, states)

    [columns] = on_columns(Scaled(), 2, 1)
    for sums, _, _ in columns:
        np.testing.assert_allclose(sums[2], 2.0 * (gradients_of(0, 0)[2] + gradients_of(1, 0)[2]), rtol=1e-6)


def test_an_exchange_in_a_condition_is_rejected() -> None:
    with pytest.raises(ValueError, match="Columns cannot exchange gradients within a condition"):
        on_columns(WarmUp(ErrorFeedback(METHODS["int4"]), 2), 2, 1)
