"""All methods, as the contract has them, and NumPy's references of those that are not random."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy_references as references

from tfdist.compression import (
    Cast,
    Compressor,
    Dense,
    ErrorFeedback,
    MomentumCorrection,
    PowerSGD,
    Quantize,
    RandomK,
    Sign,
    TopK,
    WarmUp,
)

METHODS: dict[str, Compressor] = {
    "dense": Dense(),
    "bf16": Cast("bfloat16"),
    "fp16": Cast("float16"),
    "fp8": Cast("float8"),
    "int8": Quantize(8),
    "int8 of 64": Quantize(8, block_size=64),
    "int4": Quantize(4),
    "int4 of 32": Quantize(4, block_size=32),
    "qsgd": Quantize(8, stochastic=True),
    "qsgd4": Quantize(4, block_size=128, stochastic=True),
    "sign": Sign(),
    "sign of 32": Sign(32),
    "topk 0.01": TopK(0.01),
    "topk 0.1 of 64": TopK(0.1, 64),
    "topk 0.25 of 256": TopK(0.25, 256),
    "topk 0.02 of 1000": TopK(0.02, 1000),
    "topk 0.5 of 2": TopK(0.5, 2),
    "randomk 0.01": RandomK(0.01),
    "randomk 0.3": RandomK(0.3, seed=5),
    "powersgd 1": PowerSGD(1),
    "powersgd 2": PowerSGD(2, seed=3),
    "powersgd 8": PowerSGD(8),
}
SHAPES = [(), (1,), (7,), (300,), (33, 65), (3, 3, 8, 16), (0,)]

# One of each class: what wraps them knows no more of them.
KINDS = ["bf16", "fp8", "int4", "qsgd", "sign", "topk 0.1 of 64", "randomk 0.3", "powersgd 2"]
WRAPPED: dict[str, Compressor] = {
    **METHODS,
    **{f"feedback {name}": ErrorFeedback(METHODS[name]) for name in KINDS},
    **{f"warm-up {name}": WarmUp(ErrorFeedback(METHODS[name]), 2) for name in KINDS},
    **{
        f"momentum {name}": MomentumCorrection(METHODS[name], 0.9, clipnorm=5.0)
        for name in KINDS
        if name.startswith("topk")
    },
    "momentum randomk 0.3": MomentumCorrection(METHODS["randomk 0.3"]),
}


@dataclass(frozen=True)
class Case:
    """A method and its reference; `factor` is the largest relative error of float32 in what both compute."""

    compressor: Any
    reference: Any
    tolerance: float = 1e-6


def of_blocks(values: int, of_values: Any, two_phases: bool = True) -> references.OfBlocks:
    return references.OfBlocks(values, of_values, two_phases)


def cases() -> dict[str, Case]:
    """A new reference each, as they have a state."""
    return {
        "dense": Case(Dense(), references.Exactly()),
        "bf16": Case(Cast("bfloat16"), of_blocks(2, references.bfloat16)),
        "fp16": Case(Cast("float16"), of_blocks(2, references.float16)),
        "fp8": Case(Cast("float8"), of_blocks(128, references.float8_by_float16)),
        "int8": Case(Quantize(8), of_blocks(256, references.integers(127))),
        "int8 of 64": Case(Quantize(8, 64), of_blocks(64, references.integers(127))),
        "int4": Case(Quantize(4), of_blocks(256, references.integers(7))),
        "sign": Case(Sign(), of_blocks(256, references.signs)),
        "sign of 64": Case(Sign(64), of_blocks(64, references.signs)),
        "topk 0.01": Case(TopK(0.01), of_blocks(100, references.largest_values(1), two_phases=False)),
        "topk 0.1 of 64": Case(TopK(0.1, 64), of_blocks(64, references.largest_values(6), two_phases=False)),
        "topk 0.02 of 1000": Case(TopK(0.02, 1000), of_blocks(1000, references.largest_values(20), two_phases=False)),
    }


def low_rank(rank: int, shapes: list[tuple[int, ...]]) -> Case:
    """PowerSGD starts with the factors in its state: randomness is not a part of the method.

    The Gram matrix of the columns squares their condition number, some tens here, and float32 has 6e-8.
    """
    compressor = PowerSGD(rank)
    factors = [np.asarray(compressor.initial_state(shape)["factor"]) for shape in shapes]
    return Case(compressor, references.LowRank(factors), tolerance=1e-4)
