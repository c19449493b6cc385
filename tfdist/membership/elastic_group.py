"""The workers of an elastic training as one of them sees them: who trains, exchanges with them, and their state."""

import contextlib
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfdist.exchange.group_listener import Encryption, GroupListener
from tfdist.exchange.result_log import ResultLog
from tfdist.exchange.worker_exchange import Exchange, exchange_credentials
from tfdist.membership.decisions import View
from tfdist.membership.membership import Membership
from tfdist.membership.state_transfer import StateDonor, StateReceiver
from tfdist.transport.transport_errors import TransportError


class ElasticGroup:
    """Connects this worker with the others, until `close`.

    Args:
        rank: The rank of this worker.
        addresses: `host:port` of each worker, by rank.
        token: A secret of all workers.
        cluster: A description that all workers of one attempt have in common.
        offer: What a worker that joins gets to know, as JSON.
        timeout_seconds: How long the others may take to start, and a worker that joins waits for a state.
        silence_seconds: The time after which a worker that says nothing counts as lost.
        encryption: Encrypts connections between hosts, if given.

    Attributes:
        membership: Who trains.
        donor: Sends the state of this worker to those that join.
        log: Through which the results of all exchanges go.

    Raises:
        TimeoutError, OSError, HandshakeError: See `Exchange`.
        JoinError: The others train, and do not answer.
    """

    def __init__(
        self,
        rank: int,
        addresses: Sequence[str],
        *,
        token: str,
        cluster: str,
        offer: Callable[[], Mapping[str, Any]],
        timeout_seconds: float,
        silence_seconds: float,
        encryption: Encryption | None,
    ) -> None:
        self.rank, self.addresses, self.timeout_seconds = rank, list(addresses), timeout_seconds
        self._options: dict[str, Any] = {"timeout_seconds": timeout_seconds, "silence_seconds": silence_seconds}
        self._token, self._cluster, self._encryption = token, cluster, encryption
        self._credentials = exchange_credentials(token, cluster)
        self._listener = GroupListener(addresses[rank], self._credentials, encryption=encryption)
        self.log = ResultLog()
        self.donor = StateDonor(self._listener)
        try:
            self.membership = Membership(
                rank,
                addresses,
                self._listener,
                self._credentials,
                offer=offer,
                encryption=encryption,
                **self._options,
            )
        except BaseException:
            self._listener.close()
            raise
        _open_groups.add(self)

    @property
    def is_first(self) -> bool:
        """Whether this worker trains and has the lowest rank of those that do: what the chief does falls to it."""
        view = self.membership.view
        return self.membership.is_member and self.membership.ranks(view)[0] == self.rank

    def exchange(self, view: View | None, on_join: Callable[[Callable[[Exception], None]], None] | None) -> Exchange:
        """Connects with the members of a view, or with nobody.

        `on_join` is that of `Exchange`, whose errors this raises.
        """
        return Exchange(
            self.rank,
            self.addresses,
            members=[self.rank] if view is None else self.membership.ranks(view),
            token=self._token,
            cluster=self._cluster,
            encryption=self._encryption,
            listener=self._listener,
            group="alone" if view is None else f"view {view.ballot}",
            log=self.log,
            on_join=on_join,
            **self._options,
        )

    def ask_for_state(self, fit: int) -> StateReceiver | None:
        """Asks the oldest worker for its state; returns it when it is there, or `None` if they are in a later fit.

        A worker that is lost meanwhile is replaced by the next.

        Raises:
            JoinError: No worker that trains is left.
            TimeoutError: None has made a step in a `fit` in time.
        """
        while True:
            self.membership.wait_to_join(lambda: bool(self.membership.donors))
            for donor in self.membership.donors:
                with contextlib.suppress(TransportError, OSError):
                    receiver = StateReceiver(
                        self.addresses[donor],
                        self._credentials,
                        fit,
                        self.membership.notify,
                        encryption=self._encryption,
                    )
                    if not self.membership.wait_to_join(lambda: receiver.has_answered, self.timeout_seconds):  # noqa: B023
                        receiver.close()
                        raise TimeoutError(
                            f"Worker {donor} has not sent the state of the training in {self.timeout_seconds:g} s. "
                            "Expected: it makes a step of `fit` in that time. See what it does, or allow more time "
                            "with `start_timeout_seconds`."
                        )
                    if receiver.state is not None:
                        return receiver
                    receiver.close()
                    if receiver.later_fit is not None:
                        return None

    def close(self) -> None:
        """Leaves: for the others this worker has ended."""
        self.donor.close()
        self.membership.close()
        self._listener.close()
        _open_groups.discard(self)

    def _close_in_fork(self) -> None:
        self.membership.close_in_fork()
        self._listener.close_in_fork()


def _close_all_in_fork() -> None:
    for group in list(_open_groups):
        group._close_in_fork()
    _open_groups.clear()


_open_groups: "weakref.WeakSet[ElasticGroup]" = weakref.WeakSet()
os.register_at_fork(after_in_child=_close_all_in_fork)
