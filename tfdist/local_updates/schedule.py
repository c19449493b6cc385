"""When each fragment is sent and its sum is used, counted in updates. Pure functions."""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class SyncSchedule:
    """Which fragment is exchanged after which update since all weights were equal.

    >>> schedule = SyncSchedule(sync_every=10, fragments=2, overlap_steps=3)
    >>> [(update, schedule.sent_after(update)) for update in range(1, 21) if schedule.sent_after(update) is not None]
    [(5, 0), (10, 1), (15, 0), (20, 1)]
    >>> [(update, schedule.used_after(update)) for update in range(1, 21) if schedule.used_after(update) is not None]
    [(8, 0), (13, 1), (18, 0)]
    >>> schedule.under_way(5), schedule.under_way(7), schedule.under_way(8), schedule.under_way(12)
    ([0], [0], [], [1])

    Attributes:
        sync_every: From one exchange of a fragment to the next, in updates.
        fragments: The number of fragments.
        overlap_steps: From the start of an exchange to the use of its sum, in updates.
    """

    sync_every: int
    fragments: int = 1
    overlap_steps: int = 0

    @property
    def turns(self) -> list[int]:
        """For each update modulo `sync_every`, the fragment that is sent after it, or -1.

        >>> SyncSchedule(sync_every=5, fragments=2).turns
        [1, -1, 0, -1, -1]
        """
        turns = [-1] * self.sync_every
        for fragment in range(self.fragments):
            turns[((fragment + 1) * self.sync_every // self.fragments) % self.sync_every] = fragment
        return turns

    def sent_after(self, update: int) -> int | None:
        """Returns the fragment that is sent after an update, counted from 1."""
        fragment = self.turns[update % self.sync_every]
        return fragment if update > 0 and fragment >= 0 else None

    def used_after(self, update: int) -> int | None:
        """Returns the fragment whose sum is used after an update."""
        return self.sent_after(update - self.overlap_steps)

    def under_way(self, update: int) -> list[int]:
        """Returns the fragments that were sent and not used, in the order in which they were sent."""
        sent = [self.sent_after(earlier) for earlier in range(update - self.overlap_steps + 1, update + 1)]
        return [fragment for fragment in sent if fragment is not None]

    def leaves_equal_weights(self, update: int) -> bool:
        """Whether all weights are equal on all workers after an update, if nothing of a worker's own weights stays."""
        return update == 0 or (self.fragments == 1 and not self.overlap_steps and update % self.sync_every == 0)


def split_by_bytes(nbytes: Sequence[int], fragments: int) -> list[list[int]]:
    """Splits variables into groups of about equal bytes: the largest ones first, each to the smallest group.

    >>> split_by_bytes([8, 1, 6, 2, 1], 2)
    [[0, 1], [2, 3, 4]]

    Args:
        nbytes: The bytes of each variable.
        fragments: The number of groups, at most that of variables.

    Returns:
        The positions of the variables of each group, in order.
    """
    groups: list[list[int]] = [[] for _ in range(fragments)]
    totals = [0] * fragments
    for position in sorted(range(len(nbytes)), key=lambda position: -nbytes[position]):
        smallest = min(range(fragments), key=lambda group: (totals[group], len(groups[group])))
        groups[smallest].append(position)
        totals[smallest] += nbytes[position]
    return [sorted(group) for group in groups]
