"""Low-rank approximation of matrices: PowerSGD."""

from collections.abc import Mapping, Sequence

import tensorflow as tf

from tfdist.compression.compressor import Compressor, Group, Payload, Reduced, State, num_elements
from tfdist.compression.fused_calls import fused
from tfdist.compression.gradient_tensors import all_finite, flatten, unflatten
from tfdist.utils.argument_checks import check_whole_number

_DEPENDENT = 1e-4  # Squared sine of the angle below which a direction counts as a combination of the others.


class PowerSGD(Compressor):
    """Approximates the sum of the gradients by a matrix of low rank, with one step of power iteration.

    A gradient of shape `[..., n]` is a matrix `M` of `m x n`. With the factor `Q` (`n x rank`) of the previous step,
    the replicas sum `P = M Q`, orthonormalize its columns, and sum `Q = M^T P`; `P Q^T` approximates the sum of the
    gradients (Vogels et al. 2019, "PowerSGD: practical low-rank gradient compression", algorithm 1). The factor is kept
    from step to step (warm start), and error feedback is on by default. Columns of `P` that are zero or depend on the
    others are left out, and the corresponding columns of `Q` are drawn at random, so gradients of zeros or of a rank
    below `rank` work.

    Vectors, and matrices that would not become smaller, are sent uncompressed in the collective that sends `P`.

    Payload: `4 rank (m + n)` bytes. Cost: three products of an `m x n` matrix with a thin one, and two passes over the
    values for the residual.

    >>> PowerSGD(rank=4).payload_bytes((1000, 1000))
    32000
    """

    def __init__(self, rank: int = 4, seed: int = 0) -> None:
        """Creates a compressor of rank `rank`; `seed` is that of the first factor, the same on all replicas.

        Raises:
            ValueError: An argument is invalid.
        """
        check_whole_number("rank", rank, at_least=1)
        check_whole_number("seed", seed, at_least=0)
        self.rank, self.seed = rank, seed

    @property
    def needs_error_feedback(self) -> bool:
        return True

    def initial_state(self, shape: Sequence[int]) -> State:
        rows, columns = _matrix_shape(shape)
        return {"factor": self._random_factor(columns)} if self._shrinks(rows, columns) else {}

    def payload_bytes(self, shape: Sequence[int]) -> int:
        rows, columns = _matrix_shape(shape)
        return 4 * self.rank * (rows + columns) if self._shrinks(rows, columns) else 4 * num_elements(shape)

    def encode(self, gradient: tf.Tensor, state: State) -> tuple[Payload, State]:
        if "factor" not in state:
            return {"values": gradient}, state
        matrix = tf.reshape(gradient, _matrix_shape(gradient.shape))
        (left,) = orthonormal([tf.matmul(matrix, state["factor"])])
        right = _transposed_product(matrix, left)
        return {"left": left, "right": right}, {"factor": self._renewed(right)}

    def decode(self, payload: Mapping[str, tf.Tensor], shape: Sequence[int]) -> tf.Tensor:
        if "values" in payload:
            return tf.reshape(payload["values"], shape)
        return tf.reshape(tf.matmul(payload["left"], payload["right"], transpose_b=True), shape)

    def reduce(self, gradients: Sequence[tf.Tensor], group: Group, states: Sequence[State | None]) -> Reduced:
        low_rank = [position for position, state in enumerate(states) if state and "factor" in state]
        plain = [position for position in range(len(gradients)) if position not in low_rank]
        matrices = [tf.reshape(gradients[p], _matrix_shape(gradients[p].shape)) for p in low_rank]
        factors = [(states[p] or {})["factor"] for p in low_rank]
        products = [fused(tf.matmul, matrix, factor) for matrix, factor in zip(matrices, factors, strict=True)]
        first_round = [*products, *(gradients[p] for p in plain)]
        first_sums = unflatten(group.sum(flatten(first_round)), first_round)

        sums, residuals = list(gradients), [tf.zeros_like(gradient) for gradient in gradients]
        new_states: list[State] = [dict(state or {}) for state in states]
        for position, summed in zip(plain, first_sums[len(products) :], strict=True):
            sums[position] = summed
        finite = all_finite([sums[p] for p in plain])
        if not low_rank:
            return Reduced(sums, residuals, new_states, finite)
        left = orthonormal(first_sums[: len(products)])
        second_round = [_transposed_product(matrix, p) for matrix, p in zip(matrices, left, strict=True)]
        second_sums = group.sum(flatten(second_round))
        for position, matrix, p, q in zip(low_rank, matrices, left, unflatten(second_sums, second_round), strict=True):
            shape = gradients[position].shape
            approximation = tf.matmul(p, q, transpose_b=True)
            sums[position] = tf.reshape(approximation, shape)
            residuals[position] = tf.reshape(matrix - approximation * (1.0 / group.size), shape)
            new_states[position]["factor"] = self._renewed(q)
        return Reduced(sums, residuals, new_states, tf.logical_and(finite, all_finite([second_sums])))

    def _shrinks(self, rows: int, columns: int) -> bool:
        return self.rank * (rows + columns) < rows * columns

    def _random_factor(self, columns: int) -> tf.Tensor:
        return tf.random.stateless_normal([columns, self.rank], [self.seed, columns])

    def _renewed(self, factor: tf.Tensor) -> tf.Tensor:
        """Returns `factor` with columns of length 1. Random columns replace columns of zeros."""
        squares = tf.reduce_sum(tf.square(factor), axis=0)
        return tf.where(squares > 0, factor * tf.math.rsqrt(squares), self._random_factor(factor.shape[0]))


def orthonormal(matrices: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns orthonormal bases of the column spaces of `matrices`, each `[rows, rank]` for any `rows`.

    The basis comes from the eigenvectors of the Gram matrix of the columns, scaled to length 1 (Löwdin's symmetric
    orthogonalization; all matrices in one call). Directions that nearly depend on the others become zero. NaN
    propagates.

    >>> import tensorflow as tf
    >>> (basis,) = orthonormal([tf.constant([[3.0, 3.0], [4.0, 4.0], [0.0, 0.0]])])  # Two equal columns.
    >>> bool(tf.reduce_all(tf.abs(tf.matmul(basis, basis, transpose_b=True)[0, :2] - [0.36, 0.48]) < 1e-6))
    True
    """
    gram = tf.stack([tf.matmul(matrix, matrix, transpose_a=True) for matrix in matrices])
    lengths = tf.sqrt(tf.linalg.diag_part(gram))
    rank = matrices[0].shape[1]
    scales = tf.math.divide_no_nan(tf.ones_like(lengths), lengths)
    correlations = gram * scales[:, :, tf.newaxis] * scales[:, tf.newaxis, :]
    # The solver rejects values that are not finite; they propagate through the product below.
    finite = tf.reduce_all(tf.math.is_finite(correlations), axis=[1, 2], keepdims=True)
    values, vectors = tf.linalg.eigh(tf.where(finite, correlations, tf.eye(rank)))
    independent = tf.where(values > _DEPENDENT, tf.math.rsqrt(tf.maximum(values, _DEPENDENT)), tf.zeros_like(values))
    transforms = scales[:, :, tf.newaxis] * vectors * independent[:, tf.newaxis, :]
    return [tf.matmul(matrix, transform) for matrix, transform in zip(matrices, tf.unstack(transforms), strict=True)]


def _transposed_product(matrix: tf.Tensor, thin: tf.Tensor) -> tf.Tensor:
    """Returns `matrix^T thin` in half the time of `tf.matmul`, which would transpose the larger matrix."""
    return tf.transpose(tf.matmul(thin, matrix, transpose_a=True))


def _matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Returns the shape of the matrix: all axes but the last become rows; a vector becomes one column."""
    columns = int(shape[-1]) if len(shape) > 1 else 1
    return (num_elements(shape) // columns if columns else 0), columns
