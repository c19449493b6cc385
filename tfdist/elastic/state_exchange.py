"""The state of a `fit`, or of a custom loop, on its way to a worker that joins: sent, or received."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from tfdist.cluster.heartbeat import Heartbeat
from tfdist.elastic.received_state import ReceivedState
from tfdist.elastic.step_transactions import Changes, StepTransactions
from tfdist.membership.state_transfer import StateReceiver


class StateExchange:
    """What a `fit` and a custom loop have in common as a part of an elastic training.

    Args:
        transactions: Runs the steps. The `fit`, or loop, is the next one of this process.
    """

    def __init__(self, transactions: StepTransactions) -> None:
        self._transactions, self._group = transactions, transactions.group
        self._number, transactions.fits = transactions.fits, transactions.fits + 1
        self._receiver: StateReceiver | None = None
        self._reported = Changes() if self._group.membership.is_member else None

    def ask(self, meanwhile: Callable[[], None] = lambda: None) -> ReceivedState | None:
        """Returns the state of a worker that trains, or `None` if the others are in a later `fit`, or loop.

        Args:
            meanwhile: What this worker does while it waits.

        Raises:
            JoinError, TimeoutError: See `ElasticGroup.ask_for_state`.
        """
        self._receiver = self._group.ask_for_state(self._number, meanwhile)
        if self._receiver is None:
            return None
        assert self._receiver.state is not None
        return ReceivedState(self._receiver.state[1], len(self._group.addresses))

    def replay(self, received: ReceivedState) -> None:
        """Repeats the others' steps from now on. This worker has loaded what it has received."""
        assert self._receiver is not None
        self._transactions.replay(self._receiver, Changes(**received.metadata["changes"]))

    def give(self, encode: Callable[[dict[str, Any]], list[Any]]) -> None:
        """Sends the state after this step to workers that wait for it, and later what is exchanged in each step.

        Args:
            encode: Encodes the state, as `encode_state`; it gets what belongs to every state, as JSON.
        """
        donor = self._group.donor
        if not donor.is_asked or not self._group.membership.is_member:
            return
        for request in donor.requests():
            if request.fit < self._number:
                request.refuse(self._number)
            elif request.fit > self._number:
                donor.keep(request)
            else:
                common = self._transactions.common_states()
                try:
                    parts = encode({"changes": asdict(self._transactions.changes), "common_states": common})
                except Exception as error:  # this worker can train on
                    request.fail(f"{type(error).__name__}: {error}")
                    continue
                donor.send(request, self._group.membership.committed_steps, parts)
                self._group.log.keep(True)

    def report(self, heartbeat: Heartbeat) -> None:
        """Reports changes of the workers to the supervisor, once this worker is one of them."""
        changes, membership = self._transactions.changes, self._group.membership
        if not membership.is_member or changes == self._reported:
            return
        self._reported = changes
        heartbeat.membership(
            lost=changes.lost,
            joined=changes.joined,
            repeated_steps=changes.repeated_steps,
            seconds_lost=round(changes.seconds, 3),
            training=len(membership.view.members),
        )
