"""Who may commit checkpoints on an object store, and which are committed: epochs, and dense numbers within them."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from tfdist.checkpoint.errors import SupersededError
from tfdist.checkpoint.remote.remote_objects import Objects

_SEAL = b"sealed by "
_REMOVED, _REMOVED_WITH_OLDER = b"removed", b"removed with all older ones"


class Position(NamedTuple):
    """The place of a commit in the order of all: later is larger."""

    epoch: int
    number: int

    @property
    def key(self) -> str:
        """The name of the object.

        >>> Position(2, 7).key
        'commits/0000000002-0000000007'
        """
        return f"commits/{self.epoch:010d}-{self.number:010d}"


def epoch_key(epoch: int) -> str:
    """Returns the name of the object that says who owns an epoch."""
    return f"epochs/{epoch:010d}"


def newest_epoch(objects: Objects) -> int:
    """Returns the number of the newest epoch, 0 if there is none."""
    return _last(lambda epoch: objects.get(epoch_key(epoch), 1) is not None)


def last_position(objects: Objects) -> Position:
    """Returns the position of the last commit or seal, also if it is removed."""
    for epoch in range(newest_epoch(objects), 0, -1):
        if index := _last_index(objects, epoch):
            return Position(epoch, index)
    return Position(0, 0)


def create_epoch(objects: Objects, owner: bytes, after: int) -> bool:
    """Creates the epoch after another one, unless somebody else has, and ends all earlier ones.

    From then on no earlier owner can commit, and what is committed is settled.
    """
    epoch = after + 1
    if objects.create(epoch_key(epoch), owner) is not None:
        return False
    unsealed = []
    while after and not _is_sealed(objects, after):  # the oldest first: below a sealed one all are sealed
        unsealed.append(after)
        after -= 1
    for earlier in reversed(unsealed):
        index = _last_index(objects, earlier) + 1
        while True:
            there = objects.create(Position(earlier, index).key, _SEAL + str(epoch).encode())
            if there is None or there.startswith(_SEAL):
                break
            index += 1  # a commit that came before the seal
    return True


def commits(objects: Objects) -> Iterator[tuple[Position, bytes]]:
    """Yields the commits and their contents, the newest first."""
    for epoch in range(newest_epoch(objects), 0, -1):
        for index in range(_last_index(objects, epoch), 0, -1):
            position = Position(epoch, index)
            content = objects.get(position.key) or b""
            if content == _REMOVED_WITH_OLDER:
                return
            if content != _REMOVED and not content.startswith(_SEAL):
                yield position, content


def mark_removed(objects: Objects, position: Position, *, with_older: bool) -> None:
    """Makes readers skip a commit, or it and all older ones. The object stays: numbers have no gaps."""
    objects.put(position.key, _REMOVED_WITH_OLDER if with_older else _REMOVED)


def fill_gaps(objects: Objects) -> None:
    """Makes numbers dense again of which objects are gone: a rule of the bucket may expire the oldest ones.

    All numbers below one that was listed are used, so nobody can commit under what is filled in.

    Raises:
        RemoteStoreError: If the store does not answer.
    """
    epochs = {int(key.removeprefix("epochs/")) for key in objects.sizes("epochs")}
    numbers: dict[int, set[int]] = {}
    for key in objects.sizes("commits"):
        epoch, number = map(int, key.removeprefix("commits/").split("-"))
        numbers.setdefault(epoch, set()).add(number)
    last = max([*epochs, *numbers], default=0)
    gaps = {epoch_key(epoch): b"{}" for epoch in range(1, last + 1) if epoch not in epochs}
    for epoch, present in numbers.items():
        gaps |= {Position(epoch, number).key: _REMOVED for number in range(1, max(present)) if number not in present}
    for key, content in gaps.items():  # if a list was old, it is there
        objects.create(key, content)


class EpochWriter:
    """Commits in one epoch.

    Attributes:
        epoch: Its number.
        is_superseded: Whether a later owner was met.
    """

    def __init__(self, epoch: int) -> None:
        self.epoch, self.is_superseded = epoch, False
        self._last_index = 0
        self._unknown: list[bytes] = []

    def commit(self, objects: Objects, content: bytes) -> tuple[list[tuple[Position, bytes]], list[bytes]]:
        """Commits `content`, which no other commit has.

        Returns:
            What is committed now: this commit, and before it an earlier one of which it was unknown. And the contents
            of which it was unknown and which will never be committed.

        Raises:
            RemoteStoreError: If it is unknown whether it is committed. The next commit settles that.
            SupersededError: If another process has taken over.
        """
        settled: list[tuple[Position, bytes]] = []
        dropped: list[bytes] = []
        while True:
            position = Position(self.epoch, self._last_index + 1)
            try:
                there = objects.create(position.key, content)
            except BaseException:
                self._unknown.append(content)
                raise
            if there is not None and there not in self._unknown:
                self.is_superseded = True
                raise SupersededError(
                    "Another process has taken over this training. Received: an entry that this process did not write "
                    f"in {f'{objects.root}/{position.key}'!r}. Expected: one training at a time. This process must "
                    "end; if it is the right one, end the other and start it again."
                )
            self._last_index += 1
            # All that were unknown were tried under this number, which is taken now.
            dropped += [unknown for unknown in self._unknown if unknown not in (there, content)]
            self._unknown = []
            settled.append((position, content if there is None else there))
            if there is None or there == content:
                return settled, dropped


def _is_sealed(objects: Objects, epoch: int) -> bool:
    index = _last_index(objects, epoch)
    return index > 0 and (objects.get(Position(epoch, index).key) or b"").startswith(_SEAL)


def _last_index(objects: Objects, epoch: int) -> int:
    return _last(lambda index: objects.get(Position(epoch, index).key, 1) is not None)


def _last(exists: Callable[[int], bool]) -> int:
    """Returns the last of the numbers 1, 2, … that exist, 0 if none does. It asks for about twice its bits.

    >>> [_last(lambda number: number <= last) for last in (0, 1, 5, 1000)]
    [0, 1, 5, 1000]
    """
    low, step = 0, 1
    while exists(low + step):
        low, step = low + step, 2 * step
    high = low + step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if exists(middle) else (low, middle)
    return low
