"""Collects what the nodes report about one attempt, and decides when all nodes shut down."""

import dataclasses
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tfdist.launch.processes.run_policy import ShutdownOrder
from tfdist.launch.rendezvous.membership import Node
from tfdist.launch.restart.attempt_outcome import Outcome, decode_outcome, has_completed
from tfdist.launch.restart.elastic_workers import describe_too_few
from tfdist.launch.restart.worker_exit import WorkerExit
from tfdist.launch.run_spec import GracePeriods, Role, count_workers
from tfdist.utils.cores_and_ports import is_loopback

_REJOIN_SECONDS = 30.0
REPORTS = ("failed", "lost_peer", "no_worker", "training", "completed", "done")
"""Types of the messages about an attempt."""


class AttemptTracker:
    """State of one attempt, as the coordinator knows it. The failure that is reported first is the root cause.

    `least` is the least number of workers that train; 0: the attempt is not elastic. Nodes that are `absent` have begun
    it under another coordinator; workers are counted when they have had the time to join this one. While none of the
    nodes that are left trains, those that only became silent may train on without the coordinator, and are waited for
    during `silent_node_seconds`.
    """

    def __init__(
        self,
        number: int,
        nodes: list[Node],
        roles: Mapping[int, Role],
        *,
        now: float,
        least: int = 0,
        absent: Sequence[Node] = (),
        silent_node_seconds: float = 0.0,
    ) -> None:
        self.number = number
        self.order: ShutdownOrder | None = None
        self.ordered_at: float | None = None  # time of the order
        self.is_stopped = False  # a supervisor received a signal, before or after a failure
        self.too_few = ""  # how many workers train, if too few, or an empty string
        self.has_completed = False  # an elastic worker has ended with 0: nobody is restarted any more
        self._nodes = list(nodes)
        self._roles = roles
        self._least, self._counted_from = least, now + _REJOIN_SECONDS if absent else now
        for node in nodes:
            node.training, node.has_failure = node.share, False
        self._failed_ranks: list[int] = []  # nodes, in the order of their first failures
        self._lost_peer = ""  # a failure that only reports a lost peer
        self._lost_peer_from = now  # when it counts as the cause, unless another failure is reported
        self._saved_until: float | None = None  # end of the grace period after workers saved and exited
        self._lost = ""
        self._absent = {
            node.rank: node for node in absent
        }  # nodes that were lost while the training continues, by rank
        self._silent_node_seconds = silent_node_seconds
        self._waits_for_silent_until = now
        self._without_workers: set[int] = set()  # nodes whose workers have ended and are not restarted
        self._began, self._started_at = now, time.time()

    @property
    def is_over(self) -> bool:
        """Whether no node runs the attempt any more."""
        return not any(node.is_running for node in self._nodes)

    def receive(
        self, node: Node, message: Mapping[str, Any], *, grace_periods: GracePeriods, now: float
    ) -> dict[str, Any] | None:
        """Takes one of the `REPORTS` of a node that runs the attempt, and returns the answer, if any.

        ValueError, KeyError and TypeError mean that the message is malformed.
        """
        match message["type"]:
            case "failed":
                self.fail(node, str(message["text"]), now=now)
            case "lost_peer":
                # Its node has waited for another cause.
                self._lost_peer, self._lost_peer_from = self._lost_peer or str(message["text"]), now
            case "done":
                self.finish(node, decode_outcome(message["outcome"], node.host), grace_periods=grace_periods, now=now)
            case "no_worker":
                self._without_workers.add(node.rank)
                if not self._has_workers:  # this node has the exit that is the cause
                    return {"type": "no_worker_left", "attempt": self.number}
            case "training":
                node.training, node.has_failure = int(message["count"]), bool(message["has_failure"])
            case "completed":
                self.has_completed = True
        return None

    def fail(self, node: Node, text: str, *, now: float) -> None:
        """Records a failure with a cause on its node."""
        if node.rank not in self._failed_ranks:
            self._failed_ranks.append(node.rank)
        self._order(ShutdownOrder(text), now)

    def lose(self, node: Node, text: str, *, is_silent: bool = False, now: float) -> str:
        """Records the loss of a node; returns what follows, for the user, if the training continues without it."""
        self._nodes.remove(node)
        if is_silent:  # it may be the side that continues; until then workers of this one do not know either
            if now >= self._counted_from:  # one that is silent again and again does not postpone it
                self._counted_from = now + _REJOIN_SECONDS
            self._waits_for_silent_until = now + self._silent_node_seconds
        is_needed = not all(role.is_restarted_alone for role in node.roles.values()) or self.has_completed
        if self._trains_too_few(now) and not self.too_few:
            is_needed, text = True, f"{text}; {describe_too_few(self._training, self._least)}"
        if self.order is None and not is_needed and self._has_workers:
            self._absent[node.rank] = node
            return f"; training continues without {', '.join(role.name for role in node.roles.values())}"
        self._lost = self._lost or ("" if self.order else text)
        self._order(ShutdownOrder(text), now)
        return ""

    def take_back(self, node: Node, *, training: int | None = None) -> bool:
        """Lets a node run the processes that were lost with it, if it has joined again at the same address.

        Args:
            node: The node.
            training: How many of its workers train, if they have run on without the coordinator; `None`: it starts
                them.

        Returns:
            Whether it takes part in the attempt.
        """
        absent_node = self._absent.get(node.rank)
        is_late = training is None and (self.is_over or self.has_completed)
        if absent_node is None or self.order is not None or self.too_few or is_late:
            return False
        # The coordinator's own host may have joined at its loopback address, at which others do not reach it.
        is_same = node.address == absent_node.address or (node.rank == 0 and is_loopback(node.address))
        if not is_same or node.workers < absent_node.share:
            return False
        node.share, node.roles, node.ports = absent_node.share, absent_node.roles, absent_node.ports
        node.training = training or 0  # those that it starts have to join the others
        del self._absent[node.rank]
        self._without_workers.discard(node.rank)
        self._nodes.append(node)
        return True

    def stop(self, number: int, text: str, *, again: bool, now: float) -> None:
        self.is_stopped = True
        if self.order is None:
            has_chief = any(node.has_chief for node in self._nodes)
            self._order(ShutdownOrder(text, stop_signal=number, only_script=has_chief), now)
        elif again and not self.order.kill:
            self.order = dataclasses.replace(self.order, kill=True)

    def finish(self, node: Node, outcome: Outcome, *, grace_periods: GracePeriods, now: float) -> None:
        """Records the outcome of a node.

        The grace periods say how long the other nodes continue after workers have saved and exited, or after a worker
        has only reported a lost peer.
        """
        node.outcome = outcome
        root_cause = outcome.root_cause
        has_saved = root_cause is not None and root_cause.is_preempted
        if node.has_chief and (has_saved or self.order is not None or not outcome.has_failed):
            self._end_servers(now)
        if self.order is not None or not outcome.has_failed:
            return
        if has_saved:
            self._saved_until = self._saved_until or now + grace_periods.stop
        elif root_cause is not None and root_cause.reports_lost_peer:
            self._lost_peer = self._lost_peer or outcome.describe()
            self._lost_peer_from = max(self._lost_peer_from, now + grace_periods.patience)
        else:
            self.fail(node, outcome.describe(), now=now)

    def check(self, *, suspects: bool, grace_periods: GracePeriods, now: float) -> None:
        """Counts the workers of an elastic attempt, and orders the shutdown if a grace period is over.

        If it `suspects` that a node, or a worker of a node, is about to be lost, a failure that only reports a lost
        peer is not yet the cause.
        """
        if self._trains_too_few(now) and not (self.too_few or self.has_completed or self.order):
            self.too_few = describe_too_few(self._training, self._least)
            # The nodes have the exits that are the cause, which may still follow.
            self._lost_peer = self._lost_peer or self.too_few
            self._lost_peer_from = max(self._lost_peer_from, now + grace_periods.patience)
        if self._lost_peer and now >= self._lost_peer_from and not suspects:
            must_save = bool(self.too_few) and not any(node.has_failure for node in self._nodes)
            self._order(ShutdownOrder(self._lost_peer, must_save=must_save), now)
        if self._saved_until is not None and now >= self._saved_until:
            self._order(ShutdownOrder("workers of other hosts saved and exited"), now)

    def outcome(self, *, now: float) -> Outcome:
        """Returns the outcome of all nodes."""
        failure_order = {rank: place for place, rank in enumerate(self._failed_ranks)}
        nodes = sorted(self._nodes, key=lambda node: failure_order.get(node.rank, len(failure_order)))
        absent_ranks = [rank for node in self._absent.values() for rank in node.roles if node.roles[rank].is_elastic]
        left_out = frozenset(absent_ranks).union(*(node.outcome.left_out for node in nodes if node.outcome is not None))
        run_fields: dict[str, Any] = {"lost": self._lost, "too_few": self.too_few, "left_out": left_out}
        if self.order is not None:
            run_fields["stop_signal"] = self.order.stop_signal
        return _merge(
            [node.outcome for node in nodes if node.outcome is not None],
            attempt=self.number,
            workers=count_workers(self._roles),
            roles=self._roles,
            started_at=self._started_at,
            seconds=(now if self.ordered_at is None else self.ordered_at) - self._began,
            **run_fields,
        )

    @property
    def _has_workers(self) -> bool:
        """Whether any node has a worker that runs or will be restarted."""
        return any(node.share and node.rank not in self._without_workers for node in self._nodes)

    @property
    def _training(self) -> int:
        """Number of elastic workers of all nodes that train."""
        return sum(node.training for node in self._nodes)

    def _trains_too_few(self, now: float) -> bool:
        if self._absent and not self._training and now < self._waits_for_silent_until:
            return False
        return self._training < self._least and now >= self._counted_from

    def _end_servers(self, now: float) -> None:
        """Ends the workers of other nodes when the chief, for which they run TensorFlow's server, has ended."""
        self._order(ShutdownOrder("the chief has ended"), now)
        if self.order is not None and self.order.only_script:
            self.order = dataclasses.replace(self.order, only_script=False)

    def _order(self, order: ShutdownOrder, now: float) -> None:
        if self.order is None:
            self.order, self.ordered_at = order, now


def _merge(outcomes: Sequence[Outcome], **run_fields: Any) -> Outcome:
    """Returns one outcome for all nodes.

    The outcome of the node that failed first comes first; `run_fields` are those that no single node knows.
    """
    exits = tuple(worker_exit for outcome in outcomes for worker_exit in outcome.exits)
    fit = max((outcome.fit for outcome in outcomes), default=1)
    furthest = [outcome for outcome in outcomes if outcome.fit == fit]
    return Outcome(
        exits=_without_needless(exits, run_fields["roles"]),
        stall=next((outcome.stall for outcome in outcomes if outcome.stall), ""),
        start_failure=next((outcome.start_failure for outcome in outcomes if outcome.start_failure is not None), None),
        heartbeat_ranks=frozenset().union(*(outcome.heartbeat_ranks for outcome in outcomes)),
        fit=fit,
        step=_highest(outcome.step for outcome in furthest),
        saved=_highest(outcome.saved for outcome in furthest),
        errors={rank: error for outcome in outcomes for rank, error in outcome.errors.items()},
        **run_fields,
    )


def _without_needless(exits: Sequence[WorkerExit], roles: Mapping[int, Role]) -> tuple[WorkerExit, ...]:
    """Returns the exits; those of servers are no failures if the chief has ended successfully and was not signalled.

    The chief's node reports late if the chief has left processes behind. Servers on other nodes then miss the chief and
    end.
    """
    if not has_completed(exits, roles):
        return tuple(exits)
    return tuple(
        worker_exit
        if roles[worker_exit.rank].runs_script
        else dataclasses.replace(worker_exit, failure_reason="", was_signalled=True)
        for worker_exit in exits
    )


def _highest(numbers: Iterable[int | None]) -> int | None:
    return max((number for number in numbers if number is not None), default=None)
