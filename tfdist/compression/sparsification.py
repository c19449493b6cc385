"""Sparsification: sends a few of the values, the largest or random ones."""

from collections.abc import Mapping, Sequence

import tensorflow as tf

from tfdist.compression.block_compressor import BlockCompressor
from tfdist.compression.compressor import Compressor, Group, Payload, Reduced, State, num_elements
from tfdist.compression.gradient_tensors import all_finite, flatten, unflatten


class TopK(BlockCompressor):
    """Sends the values of largest magnitude, with their positions.

    The gradient is split into blocks, and the `ratio * block_size` largest values of each block are sent: the
    chunk-wise selection of Chen et al. 2020 ("ScaleCom"). The payload has a static size, a position needs one byte (two
    in blocks of more than 256), and values are compared within a block only: the selection of 1 % by blocks costs a
    tenth of one by sorting. Error feedback (on by default) keeps the other values (Stich et al. 2018, "Sparsified SGD
    with memory"; Lin et al. 2018, "Deep gradient compression", whose momentum correction is `MomentumCorrection`).

    Payload: 5 bytes for each value sent, 0.05 bytes for each value of the gradient with the ratio 0.01. Each replica
    sends its payload to all others, `N - 1` payloads. Cost: two passes over the values to encode, one to decode.

    >>> TopK(0.01).payload_bytes((100_000,))
    5000
    """

    two_phases = False
    is_fused = False

    def __init__(self, ratio: float = 0.01, block_size: int | None = None) -> None:
        """Creates a compressor that sends the fraction `ratio` of the values.

        Args:
            ratio: Above 0 and at most 0.5.
            block_size: The number of values of which `ratio * block_size` are sent, at most 65536. By default
                `1 / ratio`, of which one is sent. Larger blocks approximate the largest values of the gradient better
                and cost more.

        Raises:
            ValueError: An argument is invalid.
        """
        _check_ratio(ratio)
        largest = 1 << 16
        if block_size is None:
            block_size = min(round(1 / ratio), largest)
        # `+ 1`, because the default may be rounded down.
        is_int = isinstance(block_size, int) and not isinstance(block_size, bool)
        if not is_int or not 1 / ratio <= block_size + 1 <= largest + 1:
            raise ValueError(
                f"Invalid `block_size` for ratio={ratio:g}. Received: block_size={block_size!r}. Expected: an integer "
                f"between {round(1 / ratio)} and {largest}, or None."
            )
        self.ratio, self.block_size = float(ratio), block_size

    @property
    def needs_error_feedback(self) -> bool:
        return True

    @property
    def _chosen(self) -> int:
        """The number of values that are sent of a block."""
        return max(1, round(self.ratio * self.block_size))

    @property
    def _index_dtype(self) -> tf.DType:
        return tf.uint8 if self.block_size <= 256 else tf.uint16

    @property
    def _group(self) -> int:
        """The number of blocks that are encoded together, so that their indices fill complete words."""
        in_a_word = 4 // self._index_dtype.size
        return next(blocks for blocks in (1, 2, 4) if blocks * self._chosen % in_a_word == 0)

    @property
    def block_values(self) -> int:
        return self._group * self.block_size

    @property
    def block_words(self) -> int:
        values = self._group * self._chosen
        return values + values * self._index_dtype.size // 4

    def encode_blocks(self, blocks: tf.Tensor, seed: tf.Tensor | None = None) -> tf.Tensor:
        blocks = tf.reshape(blocks, [-1, self.block_size])
        # The selection may leave out NaN and Inf. If there is any, NaN is sent, at the start of blocks: the ends may be
        # padding.
        finite = all_finite([blocks])
        _, indices = tf.math.top_k(tf.abs(blocks), self._chosen, sorted=False)
        indices *= tf.cast(finite, tf.int32)
        starts = tf.range(tf.shape(blocks)[0])[:, tf.newaxis] * self.block_size
        values = tf.gather(tf.reshape(blocks, [-1]), indices + starts)
        values = tf.reshape(tf.where(finite, values, float("nan")), [-1, self._group * self._chosen])
        in_a_word = 4 // self._index_dtype.size
        codes = tf.reshape(tf.cast(indices, self._index_dtype), [-1, values.shape[1] // in_a_word, in_a_word])
        return tf.concat([tf.bitcast(values, tf.int32), tf.bitcast(codes, tf.int32)], axis=1)

    def decode_blocks(self, words: tf.Tensor) -> tf.Tensor:
        values, positions = self._values_and_positions(words)
        vector = tf.math.unsorted_segment_sum(values, positions, tf.shape(words)[0] * self.block_values)
        return tf.reshape(vector, [-1, self.block_values])

    def sum_blocks(self, words: tf.Tensor) -> tf.Tensor:
        size, length = words.shape[0], tf.shape(words)[1] * self.block_values
        values, positions = self._values_and_positions(tf.reshape(words, [-1, self.block_words]))
        starts = tf.repeat(tf.range(size) * length, tf.size(positions) // size)
        return tf.reshape(tf.math.unsorted_segment_sum(values, positions - starts, length), [-1, self.block_values])

    def finiteness_probe(self, words: tf.Tensor) -> tf.Tensor:
        return tf.bitcast(words[:, : self._group * self._chosen], tf.float32)

    def _values_and_positions(self, words: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the values sent, and their positions in the vector of all blocks."""
        split = self._group * self._chosen
        values = tf.reshape(tf.bitcast(words[:, :split], tf.float32), [-1])
        indices = tf.reshape(tf.bitcast(words[:, split:], self._index_dtype), [-1, self._chosen])
        starts = tf.range(tf.shape(indices)[0])[:, tf.newaxis] * self.block_size
        return values, tf.reshape(tf.cast(indices, tf.int32) + starts, [-1])


class RandomK(Compressor):
    """Sends values at random positions, which are the same on all replicas, so that one all-reduce sums them.

    Of each `1 / ratio` successive values one is sent. Its position is drawn in each step, from a seed that all replicas
    share. Error feedback (on by default) keeps the other values (Stich et al. 2018, "Sparsified SGD with memory";
    Vogels et al. 2019, "PowerSGD", appendix G, "random block" and "random K").

    Payload: 4 bytes for each value sent, 0.04 bytes for each value of the gradient with the ratio 0.01. Cost: one pass
    over the values each way.

    >>> RandomK(0.01).payload_bytes((100_000,))
    4008
    """

    def __init__(self, ratio: float = 0.01, seed: int = 0) -> None:
        """Creates a compressor that sends the fraction `ratio` of the values, above 0 and at most 0.5.

        `seed` determines the positions.

        Raises:
            ValueError: An argument is invalid.
        """
        _check_ratio(ratio)
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise ValueError(f"Invalid `seed`. Received: seed={seed!r}. Expected: an integer.")
        self.ratio, self.seed = float(ratio), seed

    @property
    def needs_error_feedback(self) -> bool:
        return True

    @property
    def _block_size(self) -> int:
        return round(1 / self.ratio)

    def initial_state(self, shape: Sequence[int]) -> State:
        return {"draws": tf.zeros([], tf.int32)}

    def payload_bytes(self, shape: Sequence[int]) -> int:
        return 4 * -(-num_elements(shape) // self._block_size) + 8  # 8 bytes for the seed.

    def encode(self, gradient: tf.Tensor, state: State) -> tuple[Payload, State]:
        seed = tf.stack([tf.constant(self.seed & 0x7FFFFFFF), state["draws"]])
        values = tf.gather(tf.reshape(gradient, [-1]), self._positions(gradient.shape, seed))
        # The selection may leave out NaN and Inf. If there is any, all sent values become NaN.
        values = tf.where(all_finite([gradient]), values, float("nan"))
        return {"values": values, "seed": seed}, {"draws": state["draws"] + 1}

    def decode(self, payload: Mapping[str, tf.Tensor], shape: Sequence[int]) -> tf.Tensor:
        positions = self._positions(shape, payload["seed"])
        return tf.reshape(tf.math.unsorted_segment_sum(payload["values"], positions, num_elements(shape)), shape)

    def reduce(self, gradients: Sequence[tf.Tensor], group: Group, states: Sequence[State | None]) -> Reduced:
        sent, seeds, new_states = [], [], []
        for gradient, state in zip(gradients, states, strict=True):
            payload, new_state = ({"values": gradient}, {}) if state is None else self.encode(gradient, state)
            sent.append(payload["values"])
            seeds.append(payload.get("seed"))
            new_states.append(new_state)
        vector = group.sum(flatten(sent))
        sums, residuals = unflatten(vector, sent), [tf.zeros_like(gradient) for gradient in gradients]
        for position, seed in enumerate(seeds):
            if seed is not None:
                gradient = gradients[position]
                sums[position] = self.decode({"values": sums[position], "seed": seed}, gradient.shape)
                decoded = self.decode({"values": sent[position], "seed": seed}, gradient.shape)
                residuals[position] = gradient - decoded
        return Reduced(sums, residuals, new_states, tf.reduce_all(tf.math.is_finite(vector)))

    def _positions(self, shape: Sequence[int], seed: tf.Tensor) -> tf.Tensor:
        """Returns one position in each block. Positions beyond the end of the gradient become its last position."""
        elements = num_elements(shape)
        starts = tf.range(0, elements, self._block_size)
        indices = tf.random.stateless_uniform(starts.shape, seed, maxval=self._block_size, dtype=tf.int32)
        return tf.minimum(starts + indices, elements - 1)


def _check_ratio(ratio: float) -> None:
    """Raises a ValueError unless `ratio` is above 0 and at most 0.5."""
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 < ratio <= 0.5:
        raise ValueError(
            f"Invalid `ratio`. Received: ratio={ratio!r}. Expected: a number above 0 and at most 0.5, such as 0.01."
        )
