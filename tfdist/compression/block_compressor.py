"""The base of methods that encode blocks of values, and the sum of encoded blocks over replicas."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from tfdist.compression.compressor import Compressor, Group, Payload, Reduced, State, num_elements
from tfdist.compression.fused_calls import fused
from tfdist.compression.gradient_tensors import all_finite, flatten, unflatten
from tfdist.compression.owned_parts import OwnedParts


class BlockCompressor(Compressor):
    """Encodes each block of `block_values` successive values to `block_words` words of 32 bits.

    The values of a gradient are padded with zeros to complete blocks. Each block has a fixed position in the payload,
    so a payload can be split between blocks, and different replicas can decode its parts. With two replicas, each sends
    its payload to the other. With more, the exchange has two phases: each replica receives its part of all payloads
    (all-to-all), decodes and sums it, encodes the sum and sends it to all replicas (all-gather). A replica of N thus
    sends `2 (N - 1) / N` payloads, as in a ring all-reduce (Tang et al. 2021, "1-bit Adam", section 6). The replica
    that encodes a sum adds its encoding error to its residuals.
    """

    #: Whether sums are encoded again. Otherwise each replica sends its payload to all others (`N - 1` payloads).
    two_phases = True

    #: Whether XLA computes encodings and their errors. XLA is slow at selecting values and drawing random numbers.
    is_fused = True

    @property
    def is_random(self) -> bool:
        """Whether `encode_blocks` draws random numbers."""
        return False

    @property
    def encodes_rows(self) -> bool:
        return True

    @property
    @abstractmethod
    def block_values(self) -> int:
        """The number of values in a block."""

    @property
    @abstractmethod
    def block_words(self) -> int:
        """The number of 32-bit words in an encoded block."""

    @abstractmethod
    def encode_blocks(self, blocks: tf.Tensor, seed: tf.Tensor | None = None) -> tf.Tensor:
        """Encodes blocks, float32 of shape `[blocks, block_values]`, to int32 of shape `[blocks, block_words]`.

        A block with NaN or Inf must decode to a block with NaN or Inf. `seed`, int32 of shape `[2]`, is for methods
        that draw random numbers.
        """

    @abstractmethod
    def decode_blocks(self, words: tf.Tensor) -> tf.Tensor:
        """Decodes `words` to blocks, float32 of shape `[blocks, block_values]`."""

    def sum_blocks(self, words: tf.Tensor) -> tf.Tensor:
        """Decodes the words of all replicas, `[size, blocks, ...]`, and sums them to `[blocks, block_values]`."""
        size, blocks = words.shape[0], tf.shape(words)[1]
        decoded = self.decode_blocks(tf.reshape(words, [-1, self.block_words]))
        parts = tf.unstack(tf.reshape(decoded, [size, blocks, self.block_values]))
        return parts[0] + parts[1] if size == 2 else tf.add_n(parts)

    def encoding_error(self, blocks: tf.Tensor, words: tf.Tensor) -> tf.Tensor:
        """Returns `blocks` minus their decoded encoding."""
        return blocks - self.decode_blocks(words)

    def finiteness_probe(self, words: tf.Tensor) -> tf.Tensor:
        """Returns few numbers. One of them is not finite if and only if a decoded value is not finite."""
        return self.decode_blocks(words)

    def initial_state(self, shape: Sequence[int]) -> State:
        return {"draws": tf.zeros([], tf.int32)} if self.is_random else {}

    def payload_bytes(self, shape: Sequence[int]) -> int:
        return 4 * self.block_words * -(-num_elements(shape) // self.block_values)

    def encode(self, gradient: tf.Tensor, state: State) -> tuple[Payload, State]:
        words, state = self._encode(self.to_blocks(gradient), state)
        return {"words": words}, state

    def decode(self, payload: Mapping[str, tf.Tensor], shape: Sequence[int]) -> tf.Tensor:
        return self.from_blocks(self.decode_blocks(payload["words"]), shape)

    def to_blocks(self, gradient: tf.Tensor) -> tf.Tensor:
        """Splits `gradient` into blocks, `[blocks, block_values]`, padded with zeros."""
        vector = tf.reshape(gradient, [-1])
        elements = vector.shape.num_elements()
        padding = -(tf.size(vector) if elements is None else elements) % self.block_values
        if elements is None or padding:
            vector = tf.pad(vector, [[0, padding]])
        return tf.reshape(vector, [-1, self.block_values])

    def from_blocks(self, blocks: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
        """Returns the tensor of `shape` that `to_blocks` split into `blocks`."""
        vector = tf.reshape(blocks, [-1])
        if isinstance(shape, tf.Tensor):
            return tf.reshape(vector[: tf.reduce_prod(shape)], shape)
        elements = num_elements(shape)
        return tf.reshape(vector if vector.shape[0] == elements else vector[:elements], shape)

    def reduce(self, gradients: Sequence[tf.Tensor], group: Group, states: Sequence[State | None]) -> Reduced:
        encoded = [position for position, state in enumerate(states) if state is not None]
        plain = [position for position, state in enumerate(states) if state is None]
        blocks = [self.to_blocks(gradients[position]) for position in encoded]
        words, new_states = [], [state or {} for state in states]
        for own_blocks, position in zip(blocks, encoded, strict=True):
            own_words, new_states[position] = self._encode(own_blocks, states[position] or {})
            words.append(own_words)
        payload = tf.concat(words, axis=0) if words else tf.zeros([0, self.block_words], tf.int32)
        values = flatten([gradients[position] for position in plain]) if plain else tf.zeros([0])
        in_one_phase = group.size <= 2 or not self.two_phases or group.may_lose_replicas
        exchange = self._one_phase if in_one_phase else self._two_phases
        total, total_values, errors, finite = exchange(payload, values, group)

        sums, residuals = list(gradients), [tf.zeros_like(gradient) for gradient in gradients]
        if plain:
            like = [gradients[position] for position in plain]
            for position, summed in zip(plain, unflatten(total_values, like), strict=True):
                sums[position] = summed
        sizes = [own_blocks.shape[0] for own_blocks in blocks]
        total_parts = tf.split(total, sizes) if len(sizes) > 1 else [total]
        error_parts = tf.split(errors, sizes) if errors is not None and len(sizes) > 1 else [errors] * len(sizes)
        for index, position in enumerate(encoded):
            shape = gradients[position].shape
            sums[position] = self.from_blocks(total_parts[index], shape)
            remainder = self._fused(self.encoding_error, blocks[index], words[index])
            if errors is not None:
                remainder = remainder + error_parts[index]
            residuals[position] = self.from_blocks(remainder, shape)
        return Reduced(sums, residuals, new_states, finite)

    def reduce_parts(
        self, gradients: Sequence[tf.Tensor], group: Group, states: Sequence[State | None], parts: OwnedParts
    ) -> Reduced:
        """Sends each part to its owner: the first of the two phases, without the error of the second one."""
        encoded = [position for position, state in enumerate(states) if state is not None]
        plain = [position for position, state in enumerate(states) if state is None]
        message, sums = [], list(gradients)
        residuals, new_states = [tf.zeros_like(gradient) for gradient in gradients], [state or {} for state in states]
        words = 0
        if encoded:
            chosen, to_encode = parts.of(encoded, self.block_values), [gradients[position] for position in encoded]
            blocks = tf.reshape(chosen.rows(to_encode), [-1, self.block_values])
            own_words, state = self._encode(blocks, states[encoded[0]] or {})
            words = chosen.length // self.block_values * self.block_words
            message.append(tf.reshape(own_words, [parts.size, words]))
            errors = tf.reshape(self._fused(self.encoding_error, blocks, own_words), [parts.size, chosen.length])
            of_gradients = chosen.whole(errors, [gradient.shape for gradient in to_encode])
            for position, residual in zip(encoded, of_gradients, strict=True):
                residuals[position], new_states[position] = residual, {**(states[position] or {}), **state}
        if plain:
            values = parts.of(plain).rows([gradients[position] for position in plain])
            message.append(tf.bitcast(values, tf.int32))
        received = group.exchange_rows(tf.concat(message, axis=1))
        totals = []
        if encoded:
            shape = [parts.size, words // self.block_words, self.block_words]
            row = tf.reshape(fused(self.sum_blocks, tf.reshape(received[:, :words], shape)), [-1])
            totals.append((encoded, chosen, row))
        if plain:
            row = tf.reduce_sum(tf.bitcast(received[:, words:], tf.float32), axis=0)
            totals.append((plain, parts.of(plain), row))
        for positions, chosen, row in totals:
            for position, part in zip(positions, chosen.split(row), strict=True):
                sums[position] = part
        return Reduced(sums, residuals, new_states, all_finite([row for *_, row in totals]))

    def _fused(self, function: Callable[..., tf.Tensor], *tensors: tf.Tensor) -> tf.Tensor:
        return fused(function, *tensors) if self.is_fused else function(*tensors)

    def _encode(self, blocks: tf.Tensor, state: State) -> tuple[tf.Tensor, State]:
        if not self.is_random:
            return self._fused(self.encode_blocks, blocks), state
        return self.encode_blocks(blocks, _seed(blocks, state["draws"])), {**state, "draws": state["draws"] + 1}

    def _one_phase(
        self, payload: tf.Tensor, values: tf.Tensor, group: Group
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor | None, tf.Tensor]:
        words = payload.shape[0] * self.block_words
        gathered = tf.reshape(group.gather(_message(payload, values)), [group.size, -1])
        received = tf.reshape(gathered[:, :words], [group.size, -1, self.block_words])
        total_values = tf.reduce_sum(tf.bitcast(gathered[:, words:], tf.float32), axis=0)
        finite = self._finite(tf.reshape(received, [-1, self.block_words]), total_values)
        return fused(self.sum_blocks, received), total_values, None, finite

    def _two_phases(
        self, payload: tf.Tensor, values: tf.Tensor, group: Group
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor | None, tf.Tensor]:
        size, blocks, elements = group.size, payload.shape[0], values.shape[0]
        own_blocks, own_elements = -(-blocks // size), -(-elements // size)
        words = own_blocks * self.block_words
        padded = tf.reshape(tf.pad(payload, [[0, own_blocks * size - blocks], [0, 0]]), [size, words])
        padded_values = tf.reshape(tf.pad(values, [[0, own_elements * size - elements]]), [size, own_elements])
        received, rank = group.exchange(tf.concat([padded, tf.bitcast(padded_values, tf.int32)], axis=1))
        part = fused(self.sum_blocks, tf.reshape(received[:, :words], [size, own_blocks, self.block_words]))
        part_values = tf.reduce_sum(tf.bitcast(received[:, words:], tf.float32), axis=0)

        part_words = self._encode(part, {"draws": rank})[0]
        gathered = tf.reshape(group.gather(_message(part_words, part_values)), [size, -1])
        sent = tf.reshape(gathered[:, :words], [-1, self.block_words])
        total_values = tf.reshape(tf.bitcast(gathered[:, words:], tf.float32), [-1])[:elements]
        error = self._fused(self.encoding_error, part, part_words)
        errors = tf.pad(error, [[rank * own_blocks, (size - 1 - rank) * own_blocks], [0, 0]])
        errors = tf.ensure_shape(errors, [size * own_blocks, self.block_values])[:blocks]
        return fused(self.decode_blocks, sent)[:blocks], total_values, errors, self._finite(sent, total_values)

    def _finite(self, words: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
        return tf.logical_and(fused(self._decode_finite, words), all_finite([values]))

    def _decode_finite(self, words: tf.Tensor) -> tf.Tensor:
        return tf.reduce_all(tf.math.is_finite(self.finiteness_probe(words)))


def _message(words: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    words = tf.reshape(words, [-1])
    if values.shape[0] == 0:
        return words
    return tf.concat([words, tf.bitcast(values, tf.int32)], axis=0)


def _seed(blocks: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
    """Returns a random seed, which differs by `number` between steps and by the values between replicas."""
    bits = tf.bitcast(tf.reduce_sum(blocks), tf.int32)
    return tf.stack([bits, tf.cast(number, tf.int32)])
