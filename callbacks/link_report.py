"""The bytes of each link between stages, for the logs and the table of CommunicationReport."""

from dataclasses import dataclass, field
from typing import Any

from tfdist.collectives import LinkStats
from tfdist.training.strategy_protocol import training_strategy
from tfdist.utils.formatting import byte_unit, short_device, table_with_total


@dataclass(frozen=True)
class LinkReading:
    """What the devices of a strategy with stages have sent in training steps.

    Attributes:
        links: By the full names of the sending and the receiving device, with a space between them.
    """

    links: dict[str, LinkStats] = field(default_factory=dict)

    @classmethod
    def of(cls, strategy: Any) -> "LinkReading | None":
        """Reads the counters of a strategy; None if its models have no stages."""
        links = training_strategy(strategy).communication_by_link("train_step")
        return None if links is None else cls({" ".join(link): stats for link, stats in links.items()})

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "LinkReading":
        """Restores a reading from the result of `asdict`."""
        return cls({name: LinkStats(**stats) for name, stats in values["links"].items()})

    def since(self, earlier: "LinkReading | None") -> "LinkReading":
        """Returns what was counted after `earlier`; None is a reading of zeros."""
        before = earlier.links if earlier is not None else {}
        names = {**self.links, **before}
        return LinkReading({one: self.links.get(one, LinkStats()) - before.get(one, LinkStats()) for one in names})

    def logs(self, updates: int) -> dict[str, float]:
        """Returns the entries of the logs: averages over the updates."""
        total = sum(self.links.values(), LinkStats())
        return {
            "activation_bytes": total.activation_bytes / updates,
            "activation_gradient_bytes": total.activation_gradient_bytes / updates,
        }

    def table(self, updates: int) -> str:
        """Returns a table with a row for each link, of averages over the updates."""
        if not updates:
            return "There was no update: no gradients were exchanged."
        total = sum(self.links.values(), LinkStats())
        unit_bytes, unit = byte_unit(total.total_bytes / updates)

        def row(name: str, stats: LinkStats) -> list[str]:
            other = stats.weight_bytes + stats.prediction_bytes
            numbers = [stats.batch_bytes, stats.activation_bytes, stats.activation_gradient_bytes]
            numbers += [stats.weight_gradient_bytes, other, stats.total_bytes]
            return [name, *(f"{number / updates / unit_bytes:.3f}" for number in numbers)]

        kinds = ["batches", "activations", "their gradients", "weight gradients", "other", "total"]
        rows = [row(" -> ".join(map(short_device, name.split())), one) for name, one in sorted(self.links.items())]
        title = f"{unit} sent per update from device to device ({updates:,} update{'s' * (updates > 1)}):"
        return "\n".join([title, *table_with_total([["link", *kinds], *rows, row("total", total)])])
