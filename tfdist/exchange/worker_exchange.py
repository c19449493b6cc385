"""The exchange of a worker with all others."""

import os
import weakref
from collections.abc import Callable, Mapping, Sequence

from tfdist.exchange.channel import Channel
from tfdist.exchange.exchange_errors import ExchangeError, GroupFailure
from tfdist.exchange.group_control import GroupControl
from tfdist.exchange.group_listener import Encryption, GroupListener
from tfdist.exchange.joining import GroupJoin
from tfdist.exchange.result_log import LoggedChannel, ResultLog
from tfdist.transport.handshake import Credentials

PROTOCOL = 1
STEPS, SMALL, BACKGROUND = CHANNELS = ("steps", "small", "background")
"""Channels: gradients; counts and metrics, which do not wait behind gradients; exchanges beside the steps."""


def exchange_credentials(token: str, cluster: str) -> Credentials:
    """Returns what workers prove to each other: a secret of all, and the same description of their attempt."""
    return Credentials("tfdist exchange", PROTOCOL, token, cluster=cluster, same_version=True)


class Exchange:
    """Connects this worker with all others, until `close`.

    Args:
        rank: The rank of this worker.
        addresses: `host:port` of each worker, by rank; IPv6 as `[::1]:port`.
        members: The ranks of the workers that exchange; by default all. The others count as workers that have zeros.
        token: A secret of all workers.
        cluster: A description that all workers of one attempt have in common, for example their addresses.
        timeout_seconds: How long the others may take to start.
        silence_seconds: The time after which a worker that says nothing counts as lost. A process that ends is noticed
            at once.
        encryption: Encrypts connections between hosts, if given.
        shares_memory: Whether workers of one host exchange by shared memory.
        check_missing: Called with the addresses of missing workers, by name, after ten seconds; may raise an error.
        listener: What listens on the address of this worker before and after; by default only while others join.
        group: The name of these workers among the groups of that listener.
        log: Through which the results of all exchanges go, if given.
        on_join: Called before the workers join, with a function that makes this worker give up with an error.

    Raises:
        TimeoutError: Workers did not start in time. The message names them.
        OSError: The port of this worker is in use.
        HandshakeError: A worker has another token, or another description of the cluster.

    >>> import numpy as np
    >>> exchange = Exchange(0, ["localhost:1"], token="secret")
    >>> exchange.channel(STEPS).all_reduce(np.array([1.5, 2.0]))
    array([1.5, 2. ])
    >>> exchange.close()
    """

    def __init__(
        self,
        rank: int,
        addresses: Sequence[str],
        *,
        members: Sequence[int] | None = None,
        token: str,
        cluster: str = "",
        timeout_seconds: float = 300.0,
        silence_seconds: float = 60.0,
        encryption: Encryption | None = None,
        shares_memory: bool = True,
        check_missing: Callable[[Mapping[str, str]], None] | None = None,
        listener: GroupListener | None = None,
        group: str = "",
        log: ResultLog | None = None,
        on_join: Callable[[Callable[[Exception], None]], None] | None = None,
    ) -> None:
        self.rank, self.size, self.addresses = rank, len(addresses), list(addresses)
        self.members = list(range(self.size)) if members is None else sorted(members)
        credentials = exchange_credentials(token, cluster)
        join = GroupJoin(
            rank,
            addresses,
            credentials,
            CHANNELS,
            members=self.members,
            group=group,
            listener=listener,
            encryption=encryption,
            shares_memory=shares_memory,
            check_missing=check_missing,
        )
        if on_join is not None:
            on_join(join.abort)
        connections = join.join(timeout_seconds)
        self._failure = GroupFailure()
        self.control = GroupControl(rank, connections.control, self._failure, silence_seconds)
        self._channels = {name: Channel(rank, links, self._failure, name) for name, links in connections.links.items()}
        self._logged = None if log is None else {n: LoggedChannel(c, log) for n, c in self._channels.items()}
        _open_exchanges.add(self)
        try:
            # No worker sends arrays before all others read them from their links, not from a handshake.
            self._wait_until_all_have_joined(timeout_seconds)
        except BaseException:
            self.close(has_ended=False)
            raise

    def channel(self, name: str) -> Channel | LoggedChannel:
        """Returns a channel, for one thread at a time."""
        return self._channels[name] if self._logged is None else self._logged[name]

    @property
    def failure(self) -> ExchangeError | None:
        """The error that ended the exchange; `None` if there is none."""
        return self._failure.error

    def wait_for_failure(self) -> None:
        self._failure.wait()

    def fail(self, cause: str) -> None:
        """Makes an error of this worker's exchanges a failure of the group: no other worker waits for it."""
        self._failure.lost(self.rank, cause)

    def close(self, *, has_ended: bool = True) -> None:
        """Leaves the group. The others notice if they still exchange.

        Args:
            has_ended: Whether this worker has ended its training, and is not lost to the others.
        """
        self.control.close(has_ended=has_ended)
        for channel in self._channels.values():
            channel.close()
        _open_exchanges.discard(self)

    def _wait_until_all_have_joined(self, timeout_seconds: float) -> None:
        self.control.publish(f"tfdist/joined/{self.rank}", "")
        for rank in self.members:
            if self.control.wait_for(f"tfdist/joined/{rank}", timeout_seconds) is None:
                raise TimeoutError(
                    f"Worker {rank} has not connected with all others after {timeout_seconds:g} s. Expected: each "
                    "worker reaches each other one. `tfdist doctor` on all hosts says which cannot."
                )

    def _close_in_fork(self) -> None:
        self.control.close_in_fork()
        for channel in self._channels.values():
            channel.close_in_fork()


def _close_all_in_fork() -> None:
    """Closes the connections in a forked child, which may live longer than its parent: the kernel would keep them."""
    for exchange in list(_open_exchanges):
        exchange._close_in_fork()
    _open_exchanges.clear()


_open_exchanges: "weakref.WeakSet[Exchange]" = weakref.WeakSet()
os.register_at_fork(after_in_child=_close_all_in_fork)
