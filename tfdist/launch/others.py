"""The other hosts of a run, as an attempt sees them; here: of a run on one host, where there are none."""

import dataclasses
from typing import Protocol


@dataclasses.dataclass(frozen=True)
class Order:
    """That all hosts are to end their workers.

    Args:
        reason: What to tell the user.
        stop_signal: The signal that one of the supervisors was sent, or None after a failure.
        kill: Whether to kill them at once.
    """

    reason: str
    stop_signal: int | None = None
    kill: bool = False


class Others(Protocol):
    """What an attempt hears from other hosts and tells them."""

    @property
    def order(self) -> Order | None:
        """Whether and why the workers are to be ended."""

    @property
    def descriptor(self) -> int | None:
        """What becomes readable when they say something, or None."""

    def exchange(self, *, suspects: bool) -> None:
        """Hears and tells what there is; to be called several times a second.

        Args:
            suspects: Whether a worker of this host may be about to be found frozen.
        """

    def tell_stop(self, received: list[int]) -> None:
        """Tells of the signals that this supervisor was sent, each once."""

    def tell_failure(self, text: str) -> None:
        """Tells at once of a failure that is a cause of its own."""

    def tell_echo(self, text: str) -> bool:
        """Tells of a failure that only speaks of a lost peer, and returns whether they will say what is to follow."""


class Alone:
    """Nobody."""

    order = None
    descriptor = None

    def exchange(self, *, suspects: bool) -> None:
        """Does nothing."""

    def tell_stop(self, received: list[int]) -> None:
        """Does nothing."""

    def tell_failure(self, text: str) -> None:
        """Does nothing."""

    def tell_echo(self, text: str) -> bool:
        """Says that the attempt decides alone."""
        return False
