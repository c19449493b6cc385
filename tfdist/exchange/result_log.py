"""The results of exchanges, kept for a worker that joins, or taken from such a log in place of an exchange."""

import collections
import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tfdist.exchange.channel import Channel, new_result
from tfdist.exchange.exchange_errors import ExchangeError

Array = NDArray[Any]


@dataclasses.dataclass(frozen=True)
class LoggedResult:
    """The result of one exchange on a channel."""

    channel: str
    kind: str  # the name of the method of `Channel`
    values: Array

    def described(self) -> str:
        """Returns it without the values, for messages."""
        return f"{self.kind} of {self.values.dtype.name}{list(self.values.shape)} on {self.channel!r}"


class ReplayError(ExchangeError):
    """This worker repeats the steps of the others, and makes other exchanges than they have made.

    Args:
        received: What it exchanges.
        expected: What the others have exchanged at this place.
    """

    def __init__(self, received: str, expected: str) -> None:
        super().__init__(
            f"A worker that joins makes other exchanges than the others. Received: {received}. Expected: {expected}, "
            "as the others at this step. All workers run the same program with the same data; make what it does after "
            "a start independent of the worker and of the time, and start this worker again."
        )


class ResultLog:
    """Through which the results of all exchanges of a worker go.

    It lets them pass, until `keep` or `replay` is called.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[LoggedResult] | None = None
        self._replayed: dict[str, collections.deque[LoggedResult]] | None = None

    def keep(self, is_wanted: bool) -> None:
        """Begins, or ends, to keep results. Those that are kept already stay."""
        with self._lock:
            self._kept = (self._kept or []) if is_wanted else None

    def take(self) -> list[LoggedResult]:
        """Returns the results that were kept since the last call, each channel's in their order."""
        with self._lock:
            kept, self._kept = self._kept, None if self._kept is None else []
        return kept or []

    def replay(self, results: Sequence[LoggedResult] | None) -> None:
        """Returns `results` in place of those of the next exchanges; with `None` exchanges are made again.

        Their values are in memory of `new_result`, and used once.

        Raises:
            ReplayError: Results of the last call are left.
        """
        with self._lock:
            left = [result for queue in (self._replayed or {}).values() for result in queue]
            if left:
                raise ReplayError("the end of a step", left[0].described())
            self._replayed = None if results is None else collections.defaultdict(collections.deque)
            for result in results or ():
                assert self._replayed is not None
                self._replayed[result.channel].append(result)

    def result(self, channel: Channel, kind: str, values: Array) -> Array:
        """Makes an exchange, or returns the result that others had."""
        if self._replayed is not None:
            return self._next(channel, kind, values)
        result: Array = getattr(channel, kind)(values)
        if self._kept is not None:
            kept = new_result(result.shape, result.dtype)
            kept[...] = result  # which may be overwritten in place
            logged = LoggedResult(channel.name, kind, kept)
            with self._lock:
                if self._kept is not None:
                    self._kept.append(logged)
        return result

    def _next(self, channel: Channel, kind: str, values: Array) -> Array:
        with self._lock:
            assert self._replayed is not None
            queue = self._replayed[channel.name]
            logged = queue.popleft() if queue else None
        shapes = {
            "all_gather": (channel.size, *values.shape),
            "reduce_scatter": values.shape[1:],
        }
        expected = LoggedResult(channel.name, kind, np.empty(shapes.get(kind, values.shape), values.dtype))
        if logged is None:
            raise ReplayError(expected.described(), "no further exchange")
        if logged.described() != expected.described():
            raise ReplayError(expected.described(), logged.described())
        return logged.values


class LoggedChannel:
    """A `Channel` whose results go through a log."""

    def __init__(self, channel: Channel, log: ResultLog) -> None:
        self._channel, self._log = channel, log
        self.size, self.name = channel.size, channel.name
        self.before_next = channel.before_next

    def all_reduce(self, values: Array) -> Array:
        """See `Channel.all_reduce`."""
        return self._log.result(self._channel, "all_reduce", values)

    def reduce_scatter(self, rows: Array) -> Array:
        """See `Channel.reduce_scatter`."""
        return self._log.result(self._channel, "reduce_scatter", rows)

    def all_gather(self, values: Array) -> Array:
        """See `Channel.all_gather`."""
        return self._log.result(self._channel, "all_gather", values)

    def all_to_all(self, rows: Array) -> Array:
        """See `Channel.all_to_all`."""
        return self._log.result(self._channel, "all_to_all", rows)

    def broadcast(self, values: Array) -> Array:
        """See `Channel.broadcast`."""
        return self._log.result(self._channel, "broadcast", values)
