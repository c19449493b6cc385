"""Exchanges of arrays against NumPy, for each dtype, size, number of workers and kind of link."""

import ml_dtypes
import numpy as np
import pytest
from worker_groups import linked_channels, on_workers

from tfdist.exchange.channel import add_in_order
from tfdist.exchange.exchange_calls import HEADER_BYTES
from tfdist.exchange.exchange_errors import ExchangeMismatchError
from tfdist.exchange.links import SEGMENT_BYTES, SocketLink
from tfdist.planning.link_costs import sent_bytes
from tfdist.planning.measurements import SUM
from tfdist.utils.sum_copies import SHORT_BYTES, sum_copies

DTYPES = ["float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64", "bool", "complex64"]
# Empty, one value, short, longer than a segment by an odd number of values.
SIZES = [0, 1, 1000, SEGMENT_BYTES // 4 * 3 + 7]
KINDS = ["sockets", "memory"]


def values_of(rank: int, size: int, dtype: str) -> np.ndarray:
    draws = np.random.default_rng(rank).normal(size=size) * 3
    return draws.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def summed_in_order(arrays: list[np.ndarray]) -> np.ndarray:
    """Sums in the order of ranks: in float32 where values have fewer bits, with one rounding."""
    dtype = arrays[0].dtype
    if dtype.kind == "b":
        return np.any(arrays, axis=0)
    is_short = dtype.itemsize < 4 and dtype.kind not in "iu"
    total = arrays[0].astype(np.float32) if is_short else arrays[0].copy()
    for array in arrays[1:]:
        total = total + array.astype(total.dtype)
    return total.astype(dtype)


def same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_sums_have_the_bits_of_numpy_in_the_order_of_ranks(size: int, kind: str) -> None:
    with linked_channels(size, kind) as channels:
        for dtype in DTYPES:
            for count in SIZES:
                arrays = [values_of(rank, count, dtype) for rank in range(size)]
                results = on_workers(size, lambda rank, arrays=arrays: channels[rank].all_reduce(arrays[rank]))
                expected = summed_in_order(arrays)
                assert all(same_bits(result, expected) for result in results), (dtype, count, results)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_as_many_bytes_are_sent_as_plans_and_counters_state(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    stock = SocketLink.send

    def send(self: SocketLink, data: memoryview) -> bool:
        is_complete = stock(self, data)
        sent.extend([len(data)] if is_complete else [])
        return is_complete

    monkeypatch.setattr(SocketLink, "send", send)
    shortest_of_two_rounds = SHORT_BYTES // (size - 1) + 1
    with linked_channels(size, "sockets") as channels:
        for nbytes in (8, shortest_of_two_rounds - 1, shortest_of_two_rounds, 3 * SEGMENT_BYTES + 5):
            sent.clear()
            on_workers(size, lambda rank, nbytes=nbytes: channels[rank].all_reduce(np.ones(nbytes, np.uint8)))
            of_each = sum(sent) / size - (size - 1) * HEADER_BYTES
            assert of_each == pytest.approx(sum_copies(nbytes, size) * nbytes)
            assert of_each == pytest.approx(sent_bytes(SUM, nbytes, size))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_and_gathers(kind: str) -> None:
    size, columns = 3, SEGMENT_BYTES // 8 + 4
    with linked_channels(size, kind) as channels:
        rows = [values_of(rank, size * columns, "float64").reshape(size, 5, -1) for rank in range(size)]

        def body(rank: int) -> list[np.ndarray]:
            channel = channels[rank]
            return [
                channel.all_gather(rows[rank]),
                channel.all_to_all(rows[rank]),
                channel.reduce_scatter(rows[rank]),
                channel.broadcast(rows[rank], root=1),
                channel.all_gather(np.zeros((0, 3), np.int8)),
            ]

        results = on_workers(size, lambda rank: body(rank))
        for rank, (gathered, received, reduced, sent, empty) in enumerate(results):
            assert same_bits(gathered, np.stack(rows))
            assert same_bits(received, np.stack([row[rank] for row in rows]))
            assert same_bits(reduced, summed_in_order([row[rank] for row in rows]))
            assert same_bits(sent, rows[1])
            assert empty.shape == (3, 0, 3)


def test_a_part_of_a_sum_has_the_bits_of_the_whole() -> None:
    with linked_channels(3, "memory") as channels:
        rows = [values_of(rank, 3 * 70_000, "float32").reshape(3, -1) for rank in range(3)]
        parts = on_workers(3, lambda rank: channels[rank].reduce_scatter(rows[rank]))
        whole = on_workers(3, lambda rank: channels[rank].all_reduce(rows[rank].reshape(-1)))
        assert same_bits(np.concatenate(parts), whole[0])


def test_bytes_of_different_lengths() -> None:
    with linked_channels(3, "sockets") as channels:
        data = [b"", b"two", b"x" * 1000]
        assert on_workers(3, lambda rank: channels[rank].all_gather_bytes(data[rank])) == [data] * 3
        errors = on_workers(3, lambda rank: channels[rank].all_gather_bytes(data[rank], limit=10))
        assert all(isinstance(error, ValueError) and "[0, 3, 1000] bytes by rank" in str(error) for error in errors)


def test_arrays_that_are_not_contiguous_or_read_only() -> None:
    with linked_channels(2, "sockets") as channels:
        whole = np.arange(40, dtype=np.float32).reshape(8, 5)
        whole.setflags(write=False)
        results = on_workers(2, lambda rank: channels[rank].all_reduce(whole[::2, 1:].T))
        assert all(same_bits(result, np.ascontiguousarray(2 * whole[::2, 1:].T)) for result in results)


def test_results_are_aligned_for_tensorflow() -> None:
    with linked_channels(2, "sockets") as channels:
        results = on_workers(2, lambda rank: channels[rank].all_gather(np.ones(7, np.int8)))
        assert all(result.ctypes.data % 64 == 0 for result in results)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "calls",
    [
        ("all_reduce", np.ones(5, np.float32), "all_gather", np.ones(5, np.float32)),
        ("all_reduce", np.ones(5, np.float32), "all_reduce", np.ones(6, np.float32)),
        ("all_reduce", np.ones(5, np.float32), "all_reduce", np.ones(5, np.int32)),
        ("all_reduce", np.ones(1_000_000, np.float32), "all_reduce", np.ones(5, np.float32)),
    ],
    ids=["kind", "size", "dtype", "long and short"],
)
def test_different_calls_are_an_error_that_names_both(calls: tuple, kind: str) -> None:
    with linked_channels(2, kind) as channels:
        first, own, second, other = calls
        errors = on_workers(2, lambda rank: getattr(channels[rank], calls[2 * rank])(calls[2 * rank + 1]))
        assert isinstance(errors[0], ExchangeMismatchError), errors
        assert f"worker 1: {second.replace('_', '-')} 0 of {other.size} {other.dtype} values" in str(errors[0])
        assert f"worker 0: {first.replace('_', '-')} 0 of {own.size} {own.dtype} values" in str(errors[0])


def test_rows_need_one_row_for_each_worker() -> None:
    with linked_channels(1, "sockets") as channels:
        (channel,) = channels
        with pytest.raises(ValueError, match=r"shape \(2, 3\), and 1 workers"):
            channel.all_to_all(np.zeros((2, 3)))


def test_order_of_addition() -> None:
    # In another order the result is 0.
    values = [np.array([1e20], np.float32), np.array([-1e20], np.float32), np.array([1.0], np.float32)]
    total = np.empty(1, np.float32)
    add_in_order(values, total)
    assert total[0] == 1.0


@pytest.mark.long
def test_an_array_of_more_than_two_gigabytes() -> None:
    with linked_channels(2, "memory") as channels:
        count = 2**31 + 1000
        results = on_workers(2, lambda rank: channels[rank].all_reduce(np.ones(count, np.int8)))
        assert all(result.size == count and result.min() == result.max() == 2 for result in results)
