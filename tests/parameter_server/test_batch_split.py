"""Splits batches into parts by rows."""

import numpy as np
import pytest
import tensorflow as tf

from tfdist.parameter_server.batch_split import split, split_all, split_by

pytestmark = pytest.mark.usefixtures("cpus")


@pytest.mark.parametrize(
    ("rows", "parts", "sizes"), [(7, 3, [3, 2, 2]), (4, 2, [2, 2]), (2, 3, [1, 1]), (1, 4, [1]), (0, 2, [0])]
)
def test_rows_are_split_in_order(rows, parts, sizes):
    values = np.arange(rows * 2).reshape(rows, 2)
    batch = ({"a": tf.constant(values), "b": (tf.constant(values[:, 0]),)}, tf.constant(-values), None)
    pieces = split(batch, parts)
    assert [len(piece[0]["a"]) for piece in pieces] == sizes
    for leaf, expected in (
        (lambda p: p[0]["a"], values),
        (lambda p: p[0]["b"][0], values[:, 0]),
        (lambda p: p[1], -values),
    ):
        np.testing.assert_array_equal(np.concatenate([leaf(piece) for piece in pieces]), expected)
    assert all(piece[2] is None for piece in pieces)


def test_no_row_of_batches_of_different_sizes_is_lost():
    batches = [(tf.range(start, end)[:, tf.newaxis],) for start, end in ((0, 7), (7, 8), (8, 10))]
    parts = split_all(batches, 3)
    rows = [[piece[0][:, 0].numpy().tolist() for piece in part] for part in parts]
    assert rows == [[[0, 1, 2], [7], [8]], [[3, 4], [9]], [[5, 6]]]


def test_a_part_has_no_pieces_without_rows():
    batches = [(tf.zeros([4, 2]),), (tf.zeros([1, 2]),)]
    parts = split_by(batches, lambda rows: [0, rows - rows // 4, rows // 4])
    assert [[len(piece[0]) for piece in part] for part in parts] == [[], [3, 1], [1]]


def test_rows_of_sparse_tensors():
    values = np.array([[0, 1, 0], [2, 0, 0], [0, 0, 3], [4, 5, 6], [0, 0, 0]], "float32")
    pieces = split((tf.sparse.from_dense(values), tf.constant(values)), 2)
    for (sparse, dense), expected in zip(pieces, (values[:3], values[3:]), strict=True):
        np.testing.assert_array_equal(tf.sparse.to_dense(sparse), expected)
        np.testing.assert_array_equal(dense, expected)
