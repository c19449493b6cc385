"""What one device has sent to another under model parallelism."""

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class LinkStats:
    """Bytes that one device has sent to another. Scalars, such as losses and norms, are not counted.

    Attributes:
        batch_bytes: Inputs, targets and sample weights, from the process that calls `fit`.
        activation_bytes: Outputs of layers for later stages, with their masks.
        activation_gradient_bytes: Gradients of those outputs.
        weight_gradient_bytes: Gradients of weights that columns sum, or that several stages share.
        weight_bytes: Weights that several stages share, and states of layers that several columns share.
        prediction_bytes: Outputs of the model for metrics, and for the caller of `predict`.
    """

    batch_bytes: int = 0
    activation_bytes: int = 0
    activation_gradient_bytes: int = 0
    weight_gradient_bytes: int = 0
    weight_bytes: int = 0
    prediction_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """The sum of all.

        >>> LinkStats(batch_bytes=3, weight_bytes=4).total_bytes
        7
        """
        return sum(getattr(self, field.name) for field in fields(self))

    def __add__(self, other: "LinkStats") -> "LinkStats":
        return LinkStats(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __sub__(self, earlier: "LinkStats") -> "LinkStats":
        """Returns what was counted after `earlier`.

        >>> LinkStats(5, 7) - LinkStats(1, 2) == LinkStats(batch_bytes=4, activation_bytes=5)
        True
        """
        return LinkStats(*(getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)))
