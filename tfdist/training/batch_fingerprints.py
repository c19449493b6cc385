"""Small descriptions of batches, by which workers see whether they have drawn the same samples."""

import functools
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Fingerprint = list[Any]  # of one input: shape, hash or projections, whether its rows differ
Fingerprints = dict[str, Fingerprint]

_BLOCK = 4096
_PROJECTIONS = 4
# CPUs with other instructions round differently: by 1e-7 of each value. Other samples differ by 1e-3 of their sum.
_TOLERANCE = 1e-5
_SHOWN_WORKERS = 8


def fingerprint(rows: np.ndarray) -> Fingerprint:
    """Returns the fingerprint of rows of an input: of floating-point numbers and pixels by projections, else by a hash.

    >>> values = np.arange(6, dtype="float32").reshape(3, 2)
    >>> same(fingerprint(values), fingerprint(values * (1 + 1e-7)))
    True
    >>> same(fingerprint(values), fingerprint(values[::-1]))
    False
    """
    varies = bool(len(rows) > 1 and np.any(rows != rows[:1])) if rows.ndim else False
    is_pixel = rows.dtype.kind in "ui" and rows.dtype.itemsize <= 2  # maybe rounded from floating-point numbers
    if rows.dtype.kind != "f" and rows.dtype.name != "bfloat16" and not is_pixel:
        content = repr(rows.tolist()).encode() if rows.dtype.kind == "O" else np.ascontiguousarray(rows).tobytes()
        return [list(rows.shape), zlib.crc32(content), varies]
    values = np.nan_to_num(rows.astype(np.float64), posinf=0.0, neginf=0.0).reshape(-1)
    largest = float(np.abs(values).max(initial=0.0)) or 1.0
    values = (values / largest).astype(np.float32)  # so that no sum overflows
    blocks = np.zeros((-(-values.size // _BLOCK), _BLOCK), np.float32)
    blocks.reshape(-1)[: values.size] = values
    projected = (blocks @ _directions()).astype(np.float64) * np.cos(np.arange(len(blocks)))[:, None]
    sums = np.array([np.abs(values).sum(dtype=np.float64), *projected.sum(axis=0)]) * largest
    return [list(rows.shape), sums.tolist(), varies]


@functools.cache
def _directions() -> np.ndarray:
    return np.random.Generator(np.random.PCG64(0)).standard_normal((_BLOCK, _PROJECTIONS), np.float32)


def same(one: Fingerprint, other: Fingerprint) -> bool:
    """Whether two fingerprints are those of the same rows."""
    if one[0] != other[0] or isinstance(one[1], list) != isinstance(other[1], list):
        return False
    if not isinstance(one[1], list):
        return bool(one[1] == other[1])
    limit = _TOLERANCE * max(one[1][0], other[1][0])
    return all(abs(a - b) <= limit for a, b in zip(one[1], other[1], strict=True))


@dataclass(frozen=True)
class Difference:
    """How workers have drawn different batches.

    Attributes:
        inputs: The inputs that differ, such as "y".
        equal: Those that do not.
        workers: The workers that differ from worker 0.
        shows_same_order: Whether labels are equal that would not be if the samples were others, or in another order.
    """

    inputs: tuple[str, ...]
    equal: tuple[str, ...]
    workers: tuple[int, ...]
    shows_same_order: bool


def compare(prints: Sequence[Fingerprints]) -> Difference | None:
    """Returns how the batches of workers differ, by rank; None if they do not.

    >>> one, other = ({"x": fingerprint(np.arange(4.0) + n), "y": fingerprint(np.arange(4))} for n in range(2))
    >>> compare([one, other])
    Difference(inputs=('x',), equal=('y',), workers=(1,), shows_same_order=True)
    """
    first = prints[0]
    names = list(dict.fromkeys(name for each in prints for name in each))

    def agrees(name: str, other: Fingerprints) -> bool:
        return name in first and name in other and same(first[name], other[name])

    differing = tuple(name for name in names if not all(agrees(name, other) for other in prints))
    if not differing:
        return None
    equal = tuple(name for name in names if name not in differing)
    workers = tuple(rank for rank, other in enumerate(prints) if not all(agrees(name, other) for name in differing))
    only_x = all(name.partition("/")[0] == "x" for name in differing)
    labels = [first[name] for name in equal if name.partition("/")[0] == "y"]
    return Difference(differing, equal, workers, only_x and any(label[2] for label in labels))


def describe(difference: Difference, where: Mapping[str, Any]) -> str:
    """Returns what was received, for a message.

    Args:
        difference: How the batches differ.
        where: `batch` and `pass`, from 0.
    """
    shown = ", ".join(map(str, difference.workers[:_SHOWN_WORKERS]))
    more = "" if len(difference.workers) <= _SHOWN_WORKERS else f" and {len(difference.workers) - _SHOWN_WORKERS} more"
    workers = f"worker {shown}" if len(difference.workers) == 1 else f"workers {shown}{more}"
    differ = " and ".join(difference.inputs)
    equal = f"; equal: {', '.join(difference.equal)}" if difference.equal else ""
    return (
        f"{differ} of {workers} {'differ' if len(difference.inputs) > 1 else 'differs'} from worker 0 in batch "
        f"{where['batch'] + 1} of pass {where['pass'] + 1} over the data{equal}"
    )
