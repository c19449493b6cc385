"""Which replica owns which values of which variable."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import tensorflow as tf

from tfdist.collectives.buckets import fill_buckets


@dataclass(frozen=True)
class Unit:
    """Variables of one dtype that are split together, as one vector, into a part of equal length for each replica.

    Attributes:
        positions: The variables, by their positions in the optimizer's list, in the order of the vector.
        part_length: Number of values of a part. The last parts may have fewer, or none.
    """

    positions: tuple[int, ...]
    part_length: int


@dataclass(frozen=True)
class Span:
    """The values `start` to `stop`, without it, of a flattened variable."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of values."""
        return self.stop - self.start


@dataclass(frozen=True)
class ShardLayout:
    """The parts of an optimizer's variables.

    A unit has the variables of a bucket, so that it is exchanged during backpropagation, and every replica owns the
    same number of values of each unit. A replica owns at most one span of a variable.

    Attributes:
        sizes: The number of values of each variable.
        units: All variables that have values, each in one unit.
        replicas: The number of replicas.
    """

    sizes: tuple[int, ...]
    units: tuple[Unit, ...]
    replicas: int

    @classmethod
    def plan(cls, specs: Sequence[tf.TensorSpec], replicas: int, bucket_bytes: int) -> "ShardLayout":
        """Distributes variables over `replicas`.

        Args:
            specs: Shapes and dtypes of the variables.
            replicas: The number of replicas.
            bucket_bytes: See `fill_buckets`.

        >>> import tensorflow as tf
        >>> layout = ShardLayout.plan([tf.TensorSpec([3]), tf.TensorSpec([2, 2])], replicas=2, bucket_bytes=0)
        >>> layout.units
        (Unit(positions=(1, 0), part_length=4),)
        >>> layout.spans(0), layout.spans(1)
        ((Span(start=0, stop=0), Span(start=0, stop=3)), (Span(start=0, stop=4), Span(start=4, stop=4)))
        """
        sizes = tuple(int(spec.shape.num_elements()) for spec in specs)
        units = []
        for bucket in fill_buckets(specs, bucket_bytes):
            positions = tuple(position for position in bucket.positions if sizes[position])
            total = sum(sizes[position] for position in positions)
            if total:
                units.append(Unit(positions, -(-total // replicas)))
        return cls(sizes, tuple(units), replicas)

    def spans(self, position: int) -> tuple[Span, ...]:
        """The span of the variable at `position` that each replica owns, by its number; empty ones have size 0."""
        return self._spans[position]

    @cached_property
    def _spans(self) -> dict[int, tuple[Span, ...]]:
        nothing = (Span(0, 0),) * self.replicas
        found = {position: nothing for position, size in enumerate(self.sizes) if not size}
        for unit in self.units:
            offset = 0
            for position in unit.positions:
                size = self.sizes[position]
                bounds = [min(max(part * unit.part_length - offset, 0), size) for part in range(self.replicas + 1)]
                found[position] = tuple(Span(a, b) for a, b in zip(bounds, bounds[1:], strict=False))
                offset += size
        return found
