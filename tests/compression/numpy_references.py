"""What the methods compute and what an exchange delivers, in NumPy, from papers and docstrings: calls nothing of ours.

A reference's `approximate` maps an array to what a receiver decodes. Its `exchange` maps the replicas' gradients,
`[replica][tensor]` in the order in which they are packed, to the sums and to each replica's remainders.
"""

import ml_dtypes
import numpy as np


class OfBlocks:
    """A method that encodes blocks one by one; `of_blocks` maps `[blocks, values]` to what is decoded of it."""

    def __init__(self, values, of_blocks, two_phases=True):
        self.values, self.of_blocks, self.two_phases = values, of_blocks, two_phases

    def blocks(self, array):
        flat = np.ravel(array)
        return np.pad(flat, (0, -flat.size % self.values)).reshape(-1, self.values)

    def approximate(self, array):
        return self.of_blocks(self.blocks(array)).ravel()[: array.size].reshape(array.shape)

    def exchange(self, gradients):
        size = len(gradients)
        shapes = [gradient.shape for gradient in gradients[0]]
        packed = [np.concatenate([self.blocks(gradient) for gradient in replica]) for replica in gradients]
        sent = [self.of_blocks(blocks) for blocks in packed]
        remainders = [blocks - decoded for blocks, decoded in zip(packed, sent, strict=True)]
        total = sum(sent[1:], start=sent[0])
        if self.two_phases and size > 2:
            # Each replica owns as many blocks in a row, encodes their sum, and answers for the error of that.
            encoded = self.of_blocks(total)
            own = -(-len(total) // size)
            for replica in range(size):
                part = slice(replica * own, (replica + 1) * own)
                remainders[replica][part] += (total - encoded)[part]
            total = encoded
        return self.unpacked(total, shapes), [self.unpacked(blocks, shapes) for blocks in remainders]

    def unpacked(self, blocks, shapes):
        arrays, start = [], 0
        for shape in shapes:
            elements = int(np.prod(shape))
            count = -(-elements // self.values)
            arrays.append(blocks[start : start + count].ravel()[:elements].reshape(shape))
            start += count
        return arrays


def bfloat16(blocks):
    """Rounded to nearest even at the 16th bit."""
    bits = blocks.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def float16(blocks):
    return np.clip(blocks, -65504, 65504).astype(np.float16).astype(np.float32)


def float8(blocks, moved=0):
    """E4M3 with the scale `max |x| / 448` of a block; moved up or down by the error of a rounding to float16 before.

    That is half of a last place, 2^-11 of a value, or of the smallest step, 2^-24 where 1.75 stands for 448.
    """
    scale = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(448)
    scaled = np.divide(blocks, scale, out=np.zeros_like(blocks), where=scale > 0)
    scaled = scaled + np.float32(moved) * (np.abs(scaled) * 2.0**-11 + 2.0**-17)
    return np.clip(scaled, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale


def float8_by_float16(blocks):
    """`float8` as tfdist computes it: rounded to float16 first, for want of a bitcast of float8."""
    largest = np.abs(blocks).max(axis=1, keepdims=True)
    factor = np.divide(np.float32(1.75), largest, out=np.zeros_like(largest), where=largest > 0)
    halves = (blocks * factor).astype(np.float16).astype(np.float32)
    return (halves * 256).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) / 256 * (largest / np.float32(1.75))


def integers(levels, rounded=np.rint):
    def of_blocks(blocks):
        largest = np.abs(blocks).max(axis=1, keepdims=True)
        factor = np.divide(np.float32(levels), largest, out=np.zeros_like(largest), where=largest > 0)
        return np.clip(rounded(blocks * factor), -levels, levels) * (largest / np.float32(levels))

    return of_blocks


def signs(blocks):
    scale = np.abs(blocks).mean(axis=1, keepdims=True, dtype=np.float64).astype(np.float32)
    return np.where(blocks >= 0, scale, -scale)


def largest_values(count):
    def of_blocks(blocks):
        order = np.argsort(-np.abs(blocks), axis=1, kind="stable")[:, :count]
        kept = np.zeros_like(blocks)
        np.put_along_axis(kept, order, np.take_along_axis(blocks, order, axis=1), axis=1)
        return kept

    return of_blocks


class Exactly:
    def approximate(self, array):
        return array

    def exchange(self, gradients):
        sums = [sum(column[1:], start=column[0]) for column in zip(*gradients, strict=True)]
        return sums, [[np.zeros_like(gradient) for gradient in replica] for replica in gradients]


class LowRank:
    """PowerSGD, algorithm 1, in float64 and with QR; `factors` are the first `Q`, one a tensor."""

    def __init__(self, factors):
        self.factors = [factor.astype(np.float64) for factor in factors]

    @staticmethod
    def matrix(array):
        return array.reshape(-1, array.shape[-1]).astype(np.float64)

    def approximate(self, array):
        (basis, _), matrix = np.linalg.qr(self.matrix(array) @ self.factors[0]), self.matrix(array)
        return (basis @ basis.T @ matrix).reshape(array.shape)

    def exchange(self, gradients):
        size = len(gradients)
        sums, remainders = [], [[] for _ in gradients]
        for position, column in enumerate(zip(*gradients, strict=True)):
            matrices = [self.matrix(gradient) for gradient in column]
            left, _ = np.linalg.qr(sum(matrix @ self.factors[position] for matrix in matrices))
            right = sum(matrix.T @ left for matrix in matrices)
            self.factors[position] = right / np.linalg.norm(right, axis=0)
            sums.append((left @ right.T).reshape(column[0].shape))
            for replica, gradient in enumerate(column):
                remainders[replica].append(gradient - sums[-1] / size)
        return sums, remainders


class AtPositions:
    """Random-k, at the positions that are not zero in what was `delivered`: one of each `values` successive ones."""

    def __init__(self, values):
        self.values = values

    def exchange(self, gradients, delivered):
        masks = [np.asarray(tensor) != 0 for tensor in delivered]
        for mask in masks:
            chosen = np.pad(mask.ravel(), (0, -mask.size % self.values)).reshape(-1, self.values).sum(axis=1)
            assert chosen.max() <= 1 and (chosen[:-1] == 1).all(), "one of each block; of the last, perhaps a zero"
        sums, _ = Exactly().exchange(gradients)
        kept = [summed * mask for summed, mask in zip(sums, masks, strict=True)]
        return kept, [[g * ~mask for g, mask in zip(replica, masks, strict=True)] for replica in gradients]
