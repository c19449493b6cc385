"""What is known of a tensor of a step: where its samples lie, and how its values grow with their number."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

ZERO = math.inf  # The degree of the constant 0, which has every degree.


@dataclasses.dataclass(frozen=True)
class Kind:
    """What is known of a tensor.

    Attributes:
        axes: The axes along which the samples lie, at most one if anything else is known.
        degree: The power of the number of samples with which its elements grow; `None` if it is unknown how they depend
            on the samples.
        is_reduced: Whether elements depend on several samples: they are linear in the values of the samples, by sums
            and means. No other function of such a tensor adds up over replicas.
        replicas: The power of the number of replicas by which the user's code has multiplied it.
        is_trained: Whether it depends on variables.
        blocks: How many batches follow one another along the axis of the samples; 0 for any number, as in noise.
        sizes: The degrees of the elements of a vector of whole numbers, such as a shape.
        divisor: The divisor of a quotient of two sums or means over the samples, a scalar without variables.
    """

    axes: frozenset[int] = frozenset()
    degree: float | None = 0
    is_reduced: bool = False
    replicas: int = 0
    is_trained: bool = False
    blocks: int = 1
    sizes: tuple[float | None, ...] | None = None
    divisor: Any = None

    @property
    def is_fixed(self) -> bool:
        """Whether it is the same for all samples, as weights and the number of samples are."""
        return self.degree is not None and not self.axes and not self.is_reduced

    @property
    def is_constant(self) -> bool:
        """Whether any function of it and of a replica's samples is a function of these alone."""
        return self.is_fixed and self.degree in (0, ZERO) and not self.replicas

    def at(self, axes: Iterable[int], blocks: int | None = None) -> "Kind":
        """Returns the kind with the samples along other axes."""
        moved = frozenset(axes)
        blocks = self.blocks if blocks is None else blocks
        return dataclasses.replace(self, axes=moved, blocks=blocks if moved else 1, sizes=None)


def unknown(kinds: Iterable[Kind] = (), axes: Iterable[int] = ()) -> Kind:
    """The kind of what does not depend on the samples in a known way."""
    return Kind(frozenset(axes), None, is_reduced=True, is_trained=any(kind.is_trained for kind in kinds))


def sum_of(kinds: Sequence[Kind], axes: Iterable[int] = ()) -> Kind:
    """The kind of a sum, a selection or a concatenation; unknown if the kinds of the operands differ."""
    axes = frozenset(axes)
    live = [kind for kind in kinds if kind.degree != ZERO]
    if not live:
        return Kind(axes, ZERO, blocks=0 if axes else 1)
    first = live[0]
    is_one_kind = all(
        (kind.degree, kind.replicas) == (first.degree, first.replicas) and kind.divisor is first.divisor
        for kind in live
    )
    blocks = _blocks(kinds)
    if first.degree is None or not is_one_kind or len(axes) > 1 or blocks is None:
        return unknown(live, axes)
    return Kind(
        axes,
        first.degree,
        any(kind.is_reduced for kind in live),
        first.replicas,
        any(kind.is_trained for kind in live),
        blocks if axes else 1,
        divisor=first.divisor,
    )


def product_of(kinds: Sequence[Kind], axes: Iterable[int] = (), *, is_sum: bool = False) -> Kind:
    """The kind of a product; with `is_sum`, of its sum over the samples."""
    axes = frozenset(axes)
    if any(kind.degree == ZERO for kind in kinds):
        return Kind(axes, ZERO, blocks=0 if axes else 1)
    reduced = [kind for kind in kinds if kind.is_reduced]
    unreduced = [kind for kind in kinds if not kind.is_reduced]
    mixes = len(reduced) > 1 or (reduced and not all(kind.is_fixed for kind in unreduced))
    blocks = _blocks(kinds)
    if any(kind.degree is None for kind in kinds) or mixes or len(axes) > 1 or blocks is None or (reduced and is_sum):
        return unknown(kinds, axes)
    divisor = reduced[0].divisor if reduced else None
    degree = sum(kind.degree for kind in kinds if kind.degree is not None) + is_sum
    if divisor is not None and degree:
        return unknown(kinds, axes)
    return Kind(
        axes,
        degree,
        bool(reduced) or is_sum,
        sum(kind.replicas for kind in kinds),
        any(kind.is_trained for kind in kinds),
        blocks if axes else 1,
        divisor=divisor,
    )


def quotient_of(dividend: Kind, divisor: Kind, tensor: Any, axes: Iterable[int] = ()) -> Kind:
    """The kind of a quotient by `tensor`, whose kind is `divisor`."""
    if divisor.degree in (None, ZERO):
        return unknown([dividend, divisor], axes)
    if divisor.is_reduced:
        both = (dividend, divisor)
        is_ratio = dividend.is_reduced and not divisor.is_trained and not any(kind.axes for kind in both)
        alike = (
            dividend.degree == divisor.degree
            and dividend.degree in (0, 1)
            and not (dividend.replicas or divisor.replicas)
        )
        if is_ratio and alike and all(kind.divisor is None for kind in both) and tensor.shape.rank == 0:
            return Kind(is_reduced=True, is_trained=dividend.is_trained, divisor=tensor)
        return unknown(both, axes)
    inverse = dataclasses.replace(divisor, degree=-divisor.degree, replicas=-divisor.replicas)
    return product_of([dividend, inverse], axes)


def power_of(kind: Kind, exponent: float) -> Kind:
    """The kind of a power with a constant exponent."""
    if kind.degree is None or (kind.is_reduced and exponent != 1) or kind.replicas * exponent % 1:
        return unknown([kind], kind.axes)
    if kind.degree == ZERO:
        return kind if exponent > 0 else unknown([kind], kind.axes)
    return dataclasses.replace(kind, degree=kind.degree * exponent, replicas=int(kind.replicas * exponent), sizes=None)


def function_of(kinds: Sequence[Kind], axes: Iterable[int] = ()) -> Kind:
    """The kind of any function of each sample alone."""
    axes = frozenset(axes)
    is_of_samples = all(kind.is_constant or (kind.axes and not kind.is_reduced) for kind in kinds)
    is_growing = any(kind.degree not in (0, ZERO) or kind.replicas for kind in kinds)
    blocks = _blocks(kinds)
    if not is_of_samples or is_growing or len(axes) > 1 or blocks is None:
        return unknown(kinds, axes)
    return Kind(axes, is_trained=any(kind.is_trained for kind in kinds), blocks=blocks if axes else 1)


def mean_over_samples(kind: Kind, axes: Iterable[int] = (), *, is_sum: bool = False) -> Kind:
    """The kind of a mean over the axis of the samples, or of a sum."""
    if kind.degree == ZERO or kind.degree is None:
        return kind.at(axes)
    return dataclasses.replace(kind.at(axes), degree=kind.degree + is_sum, is_reduced=True)


def _blocks(kinds: Sequence[Kind]) -> int | None:
    """The number of blocks of all kinds with samples; `None` if they differ."""
    numbers = {kind.blocks for kind in kinds if kind.axes}
    known = numbers - {0}
    return None if len(known) > 1 else known.pop() if known else 0 if numbers else 1
