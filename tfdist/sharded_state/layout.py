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
        part_length: Number of values of the longest part. The last parts may have fewer, or none.
        is_divided: Whether the vector is divided into parts of equal length. Otherwise a part has whole variables.
    """

    positions: tuple[int, ...]
    part_length: int
    is_divided: bool = True


@dataclass(frozen=True)
class Span:
    """The values `start` to `stop`, without it, of a flattened variable."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class SpanLayout:
    """The parts of an optimizer's variables.

    A unit has the variables of a bucket, so that it is exchanged during backpropagation, and every replica owns the
    same number of values of each unit. A replica owns at most one span of a variable.

    Attributes:
        sizes: The number of values of each variable.
        units: All variables that have values, each in one unit.
        replicas: The number of replicas.
        owners: The positions of whole variables, each with the replica that owns the variable.
    """

    sizes: tuple[int, ...]
    units: tuple[Unit, ...]
    replicas: int
    owners: tuple[tuple[int, int], ...] = ()

    @classmethod
    def plan(cls, specs: Sequence[tf.TensorSpec], replicas: int, bucket_bytes: int) -> "SpanLayout":
        """Distributes variables of these shapes and dtypes over `replicas`; see `fill_buckets` for `bucket_bytes`.

        >>> import tensorflow as tf
        >>> layout = SpanLayout.plan([tf.TensorSpec([3]), tf.TensorSpec([2, 2])], replicas=2, bucket_bytes=0)
        >>> layout.units
        (Unit(positions=(1, 0), part_length=4, is_divided=True),)
        >>> layout.spans(0), layout.spans(1)
        ((Span(start=0, stop=0), Span(start=0, stop=3)), (Span(start=0, stop=4), Span(start=4, stop=4)))
        """
        sizes = tuple(int(spec.shape.num_elements()) for spec in specs)
        units = []
        for bucket in fill_buckets(specs, bucket_bytes):
            positions = tuple(position for position in bucket if sizes[position])
            total = sum(sizes[position] for position in positions)
            if total:
                units.append(Unit(positions, -(-total // replicas)))
        return cls(sizes, tuple(units), replicas)

    @classmethod
    def plan_whole(cls, specs: Sequence[tf.TensorSpec], replicas: int, bucket_bytes: int) -> "SpanLayout":
        """Distributes variables over `replicas`, each of them whole, so that replicas own about as many bytes.

        A unit has `bucket_bytes` for each replica.

        >>> import tensorflow as tf
        >>> specs = [tf.TensorSpec([3]), tf.TensorSpec([2, 2]), tf.TensorSpec([])]
        >>> layout = SpanLayout.plan_whole(specs, replicas=2, bucket_bytes=0)
        >>> layout.units
        (Unit(positions=(2, 1, 0), part_length=4, is_divided=False),)
        >>> layout.owners
        ((0, 1), (1, 0), (2, 1))
        """
        sizes = tuple(int(spec.shape.num_elements()) for spec in specs)
        loads, owners, units = [0] * replicas, {}, []
        for bucket in fill_buckets(specs, bucket_bytes * replicas, packs_large=True):
            positions = tuple(position for position in bucket if sizes[position])
            # The largest first, each to the replica that owns least.
            for position in sorted(positions, key=lambda position: (-sizes[position], position)):
                owners[position] = loads.index(min(loads))
                loads[owners[position]] += sizes[position] * specs[position].dtype.size
            parts = [0] * replicas
            for position in positions:
                parts[owners[position]] += sizes[position]
            if positions:
                units.append(Unit(positions, max(parts), is_divided=False))
        return cls(sizes, tuple(units), replicas, tuple(sorted(owners.items())))

    def spans(self, position: int) -> tuple[Span, ...]:
        """The span of the variable at `position` that each replica owns, by its number; empty ones have size 0."""
        return self._spans[position]

    @cached_property
    def _spans(self) -> dict[int, tuple[Span, ...]]:
        nothing = (Span(0, 0),) * self.replicas
        spans = {position: nothing for position, size in enumerate(self.sizes) if not size}
        for position, owner in self.owners:
            spans[position] = tuple(
                Span(0, self.sizes[position] if replica == owner else 0) for replica in range(self.replicas)
            )
        for unit in self.units:
            if not unit.is_divided:
                continue
            offset = 0
            for position in unit.positions:
                size = self.sizes[position]
                bounds = [min(max(part * unit.part_length - offset, 0), size) for part in range(self.replicas + 1)]
                spans[position] = tuple(Span(a, b) for a, b in zip(bounds, bounds[1:], strict=False))
                offset += size
        return spans
