"""The workers of an elastic training as one of them sees them: who trains, exchanges with them, and their state."""

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfdist.exchange.exchange_errors import WorkerLostError
from tfdist.exchange.group_listener import Encryption, GroupListener
from tfdist.exchange.result_log import ResultLog
from tfdist.exchange.worker_exchange import Exchange, exchange_credentials
from tfdist.membership.decisions import NO_VIEW, View
from tfdist.membership.membership_errors import JoinError
from tfdist.membership.state_transfer import StateDonor, StateReceiver
from tfdist.membership.worker_membership import Membership
from tfdist.transport.transport_errors import TransportError

_MOST_TRIES = 20  # to get a state
_PAUSE_SECONDS = 0.2


class ElasticGroup:
    """Connects this worker with the others, until `close`.

    Args:
        rank: The rank of this worker.
        addresses: `host:port` of each worker, by rank.
        token: A secret of all workers.
        cluster: A description that all workers of one attempt have in common.
        beginning: How many workers begin together, those of the lowest ranks; `None`: all.
        offer: What a worker that joins gets to know, as JSON.
        timeout_seconds: How long the others may take to start, and a worker that joins waits for a state.
        silence_seconds: The time after which a worker that says nothing counts as lost.
        encryption: Encrypts connections between hosts, if given.
        majority_seconds: How long workers that are too few to continue wait for others.

    Attributes:
        connected_view: The view of the last exchange; `NO_VIEW` for one with nobody.
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
        beginning: int | None = None,
        offer: Callable[[], Mapping[str, Any]],
        timeout_seconds: float,
        silence_seconds: float,
        encryption: Encryption | None,
        majority_seconds: float = 10.0,
    ) -> None:
        self.rank, self.addresses, self.timeout_seconds = rank, list(addresses), timeout_seconds
        self._options: dict[str, Any] = {"timeout_seconds": timeout_seconds, "silence_seconds": silence_seconds}
        self._token, self._cluster, self._encryption = token, cluster, encryption
        self._credentials = exchange_credentials(token, cluster)
        self._listener = GroupListener(addresses[rank], self._credentials, encryption=encryption)
        self.connected_view = NO_VIEW
        self.log = ResultLog()
        self.donor = StateDonor(self._listener)
        try:
            self.membership = Membership(
                rank,
                addresses,
                self._listener,
                self._credentials,
                beginning=beginning,
                offer=offer,
                encryption=encryption,
                majority_seconds=majority_seconds,
                **self._options,
            )
        except BaseException:
            self.donor.close()
            self._listener.close()
            raise
        _open_groups.add(self)

    @property
    def is_first(self) -> bool:
        """Whether this worker is the oldest of those that train: it writes the files of callbacks.

        It remains so as long as it trains, since those that join are younger.
        """
        return self.membership.view.members[:1] == (self.membership.number,)

    def exchange(self, view: View | None) -> Exchange:
        """Connects with the members of a view, or with nobody. The exchange fails when the view ends.

        Raises:
            WorkerLostError: The view has ended before all have joined.
            TimeoutError, OSError, HandshakeError: See `Exchange`.
        """
        lost = WorkerLostError(self.rank, "the workers agree on others", "joining them")
        exchange = Exchange(
            self.rank,
            self.addresses,
            members=[self.rank] if view is None else self.membership.ranks(view),
            token=self._token,
            cluster=self._cluster,
            encryption=self._encryption,
            listener=self._listener,
            group="alone" if view is None else f"view {view.ballot}",
            log=self.log,
            on_join=None if view is None else lambda abort: self.membership.interrupt_by(lambda: abort(lost)),
            **self._options,
        )
        if view is not None:
            self.membership.interrupt_by(lambda: exchange.fail(lost.cause))
        self.connected_view = view or NO_VIEW
        return exchange

    def ask_for_state(self, fit: int, meanwhile: Callable[[], None] = lambda: None) -> StateReceiver | None:
        """Asks the oldest worker for its state; returns it when it is there, or `None` if they are in a later fit.

        A worker that is lost meanwhile is replaced by the next.

        Args:
            fit: The number of this worker's `fit`.
            meanwhile: Called when a worker has been asked, before this one waits for the answer.

        Raises:
            JoinError: No worker that trains is left, or none sends its state.
            TimeoutError: None has made a step in a `fit` in time.
        """
        tries = 0
        while tries < _MOST_TRIES:
            self.membership.wait_to_join(lambda: bool(self.membership.donors))
            for donor in self.membership.donors:
                tries += 1
                receiver = self._receiver(donor, fit, meanwhile)
                if receiver is None:
                    continue
                if receiver.state is not None:
                    return receiver
                receiver.close()
                if receiver.refusal:
                    raise JoinError(f"the answer of worker {donor}: {receiver.refusal}")
                if receiver.later_fit is not None:
                    return None
            self.membership.wait_to_join(lambda: False, _PAUSE_SECONDS)
        raise JoinError(f"no complete state of the workers that train, in {tries} tries")

    def _receiver(self, donor: int, fit: int, meanwhile: Callable[[], None]) -> StateReceiver | None:
        """Returns what a worker has answered, or `None` if it is not reached."""
        notify = self.membership.notify
        try:
            receiver = StateReceiver(
                donor, self.addresses[donor], self._credentials, fit, notify, encryption=self._encryption
            )
        except (TransportError, OSError):
            return None

        meanwhile()

        def has_ended() -> bool:
            return receiver.has_answered or donor not in self.membership.donors

        if self.membership.wait_to_join(has_ended, self.timeout_seconds):
            return receiver
        receiver.close()
        raise TimeoutError(
            f"Worker {donor} has not sent the state of the training in {self.timeout_seconds:g} s. Expected: it makes "
            "a step of `fit` in that time. See what it does, or allow more time with `start_timeout_seconds`."
        )

    def close(self) -> None:
        """Leaves: for the others this worker has ended."""
        self.donor.close()
        self.membership.close()
        self._listener.close()
        _open_groups.discard(self)

    def _close_in_fork(self) -> None:
        self.membership.close_in_fork()
        self.donor.close_in_fork()
        self._listener.close_in_fork()


def _close_all_in_fork() -> None:
    for group in list(_open_groups):
        group._close_in_fork()
    _open_groups.clear()


_open_groups: "weakref.WeakSet[ElasticGroup]" = weakref.WeakSet()
os.register_at_fork(after_in_child=_close_all_in_fork)
