"""Which replica owns which values of which variable."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import tensorflow as tf

from tfdist.collectives.buckets import fill_buckets
from tfdist.compression.owned_parts import Span


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
class SpanLayout:
    """The parts of an optimizer's variables.

    A unit has the variables of a bucket, so that it is exchanged during backpropagation, and every replica owns the
    same number of values of each unit. A replica owns at most one span of a variable.

    Attributes:
        sizes: The number of values of each variable.
        units: All variables that have values, each in one unit.
        replicas: The number of replicas.
        spans_of: By the position of a variable, the span that each replica owns, by its number; empty ones have size 0.
    """

    sizes: tuple[int, ...]
    units: tuple[Unit, ...]
    replicas: int
    spans_of: Mapping[int, tuple[Span, ...]]

    @classmethod
    def plan(
        cls,
        specs: Sequence[tf.TensorSpec],
        replicas: int,
        bucket_bytes: int,
        in_parts: Collection[int] = (),
    ) -> "SpanLayout":
        """Distributes variables of these shapes and dtypes over `replicas`; see `fill_buckets` for `bucket_bytes`.

        Of those at the positions `in_parts` each replica owns an equal part, as of weights that are in parts.

        >>> import tensorflow as tf
        >>> layout = SpanLayout.plan([tf.TensorSpec([3]), tf.TensorSpec([2, 2])], replicas=2, bucket_bytes=0)
        >>> layout.units
        (Unit(positions=(1, 0), part_length=4, is_divided=True),)
        >>> layout.spans(0), layout.spans(1)
        ((Span(start=0, stop=0), Span(start=0, stop=3)), (Span(start=0, stop=4), Span(start=4, stop=4)))
        """
        sizes = tuple(int(spec.shape.num_elements()) for spec in specs)
        units, spans = [], dict.fromkeys(range(len(sizes)), (Span(0, 0),) * replicas)
        for position in in_parts:
            spans[position] = equal_spans(sizes[position], replicas)
            units.append(Unit((position,), spans[position][0].size))
        packed = [position for position in range(len(specs)) if position not in in_parts]
        for bucket in fill_buckets([specs[position] for position in packed], bucket_bytes):
            positions = tuple(packed[index] for index in bucket if sizes[packed[index]])
            length, offset = -(-sum(sizes[position] for position in positions) // replicas), 0
            if positions:
                units.append(Unit(positions, length))
            for position in positions:
                bounds = [min(max(part * length - offset, 0), sizes[position]) for part in range(replicas + 1)]
                spans[position] = tuple(map(Span, bounds, bounds[1:]))
                offset += sizes[position]
        return cls(sizes, tuple(units), replicas, spans)

    @classmethod
    def plan_equal(cls, specs: Sequence[tf.TensorSpec], replicas: int, bucket_bytes: int) -> "SpanLayout":
        """Divides each variable into equal parts; those of a bucket, of `bucket_bytes`, are exchanged together.

        >>> import tensorflow as tf
        >>> layout = SpanLayout.plan_equal([tf.TensorSpec([3]), tf.TensorSpec([2, 2])], replicas=2, bucket_bytes=0)
        >>> layout.units
        (Unit(positions=(1, 0), part_length=4, is_divided=False),)
        >>> layout.spans(0)
        (Span(start=0, stop=2), Span(start=2, stop=3))
        """
        sizes = tuple(int(spec.shape.num_elements()) for spec in specs)
        spans = {position: equal_spans(size, replicas) for position, size in enumerate(sizes)}
        units = []
        for bucket in fill_buckets(specs, bucket_bytes):
            length = sum(spans[position][0].size for position in bucket)
            units.append(Unit(bucket, length, is_divided=len(bucket) == 1))
        return cls(sizes, tuple(units), replicas, spans)

    @classmethod
    def plan_whole(cls, specs: Sequence[tf.TensorSpec], replicas: int, bucket_bytes: int) -> "SpanLayout":
        """Distributes variables over `replicas`, each of them whole, so that replicas own about as many bytes.

        A unit has `bucket_bytes` for each replica.

        >>> import tensorflow as tf
        >>> specs = [tf.TensorSpec([3]), tf.TensorSpec([2, 2]), tf.TensorSpec([])]
        >>> layout = SpanLayout.plan_whole(specs, replicas=2, bucket_bytes=0)
        >>> layout.units
        (Unit(positions=(2, 1, 0), part_length=4, is_divided=False),)
        >>> [[span.size for span in layout.spans(position)] for position in range(3)]
        [[0, 3], [4, 0], [0, 1]]
        """
        sizes = tuple(int(spec.shape.num_elements()) for spec in specs)
        units, spans = [], dict.fromkeys(range(len(sizes)), (Span(0, 0),) * replicas)
        loads = [0] * replicas  # bytes
        for bucket in fill_buckets(specs, bucket_bytes * replicas, packs_large=True):
            positions = tuple(position for position in bucket if sizes[position])
            parts = [0] * replicas
            # The largest first, each to the replica that owns least.
            for position in sorted(positions, key=lambda position: (-sizes[position], position)):
                size, owner = sizes[position], loads.index(min(loads))
                spans[position] = tuple(Span(0, size if replica == owner else 0) for replica in range(replicas))
                loads[owner] += size * specs[position].dtype.size
                parts[owner] += size
            if positions:
                units.append(Unit(positions, max(parts), is_divided=False))
        return cls(sizes, tuple(units), replicas, spans)

    def spans(self, position: int) -> tuple[Span, ...]:
        """The span of the variable at `position` that each replica owns, by its number; empty ones have size 0."""
        return self.spans_of[position]


def equal_spans(size: int, replicas: int) -> tuple[Span, ...]:
    """Returns the part of each replica of a vector; the last ones may be shorter, or empty.

    >>> equal_spans(5, 4)
    (Span(start=0, stop=2), Span(start=2, stop=4), Span(start=4, stop=5), Span(start=5, stop=5))
    """
    length = -(-size // replicas)
    bounds = [min(replica * length, size) for replica in range(replicas + 1)]
    return tuple(map(Span, bounds, bounds[1:]))
