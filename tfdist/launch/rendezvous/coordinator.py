"""Decides for all nodes of a run when an attempt starts, when it is shut down, and what follows."""

import dataclasses
import enum
from collections.abc import Iterable, Mapping
from typing import Any

from tfdist.cluster import LOST_RUN_EXIT_CODE
from tfdist.launch.processes.run_policy import ShutdownOrder
from tfdist.launch.rendezvous.attempt_tracker import REPORTS, AttemptTracker
from tfdist.launch.rendezvous.membership import (
    SUSPICIOUS_HEARTBEATS,
    JoinRejectedError,
    Membership,
    Node,
    workers_left_out,
)
from tfdist.launch.restart.restart_policy import AttemptEvaluator
from tfdist.launch.run_spec import RunSpec, describe_jobs
from tfdist.transport.nonblocking_connection import NonblockingConnection
from tfdist.transport.transport_errors import ConnectionClosedError
from tfdist.utils.cores_and_ports import host_and_port
from tfdist.utils.formatting import signal_name

_READY_SECONDS = 30.0
_NO_CHANGES = "", False


class _RunPhase(enum.Enum):
    GATHERING = "waits for nodes, or for the delay before a restart"
    PREPARING = "nodes choose ports"
    RUNNING = "an attempt runs"
    OVER = "the nodes know the end of the run"


class RunCoordinator:
    """State machine of a run over several nodes, without sockets and clocks.

    The caller passes connections, messages, and `now`: a time in seconds, see `ActiveClock`.
    """

    def __init__(self, spec: RunSpec, *, now: float) -> None:
        self._spec = spec
        self._membership = Membership(spec)
        self._phase = _RunPhase.GATHERING
        self._attempt = self._round = 0
        self._not_before, self._deadline = now, now + spec.start_timeout_seconds
        self._heartbeat_at = now
        self._evaluator: AttemptEvaluator | None = None  # created when all nodes have joined
        self._left_out: dict[int, int] = {}  # by node: workers that the next attempt leaves out
        self._tracker: AttemptTracker | None = None
        self._start: dict[str, Any] = {}  # message that starts the running attempt
        self._sent_order: ShutdownOrder | None = None
        self._sent_changes = _NO_CHANGES
        self._ready_by = now
        self._reported_missing: list[int] = []
        self._broken: list[tuple[Node, str]] = []  # connections that failed while sending
        self._last_code = 1

    @property
    def is_over(self) -> bool:
        """Whether the run is over, and the nodes know it."""
        return self._phase is _RunPhase.OVER

    def join(self, connection: NonblockingConnection, message: Mapping[str, Any], *, now: float) -> Node | None:
        """Adds a node, or rejects it and returns None. ValueError, KeyError and TypeError: malformed message."""
        if self.is_over:
            reason = "Received: a request to join after the end of the run. Expected: a run in progress."
            connection.send({"type": "rejected", "reason": reason, "is_final": True})
            return None
        running = message.get("running")  # the attempt that it runs, since it has lost the coordinator
        if running is not None and not self._continues(running):
            _reject_running(connection, running)
            return None
        try:
            node, replaced_node = self._membership.admit(connection, message, now=now)
        except JoinRejectedError as rejected:
            connection.send({"type": "rejected", "reason": str(rejected), "is_final": False})
            return None
        if replaced_node is not None:
            self._handle_loss(replaced_node, "it joined again", now)
        late_nodes = [node] if running is None else []
        if running is not None:
            if self._evaluator is None:
                late_nodes = [other for other in self._membership.nodes if other is not node]
            if not self._take_back_running(node, running, now):
                self._membership.remove(node)
                _reject_running(connection, running)
                return None
        spec = self._spec
        timing = {"heartbeat_seconds": spec.heartbeat_seconds, "heartbeat_timeout": spec.heartbeat_timeout}
        connection.send({"type": "joined", "run": spec.run_id, "seed": spec.run_seed, **timing})
        if self._phase is _RunPhase.RUNNING and self._tracker is not None:
            for late_node in late_nodes:
                self._take_back(self._tracker, late_node)
            if running is not None and _changes(self._tracker) != _NO_CHANGES:  # the others know it already
                self._tell_changes(self._tracker, [node])
        return node

    def _take_back(self, tracker: AttemptTracker, node: Node) -> None:
        """Lets a node start its part of the running attempt, if it can; see `AttemptTracker.take_back`."""
        if tracker.take_back(node):
            self._send(node, {**self._start, "ranks": list(node.roles), "joins_late": True})
            self._broadcast({"type": "notice", "text": f"{node.name} takes part in attempt {self._attempt} again"})
        else:
            text = f"attempt {self._attempt} is running; {node.name} takes part from the next restart"
            self._send(node, {"type": "notice", "text": text})

    def _take_back_running(self, node: Node, running: Mapping[str, Any], now: float) -> bool:
        """Lets a node take part in the attempt that it runs; returns whether it can."""
        try:
            training = int(running["training"])
            if self._evaluator is None:
                return self._adopt(running["start"], node, training, now)
            is_taken = self._tracker is not None and self._tracker.take_back(node, training=training)
        except (ValueError, LookupError, TypeError):  # it is malformed
            self._membership.remove(node)
            raise
        if is_taken:
            self._broadcast({"type": "notice", "text": f"{node.name} takes part in attempt {self._attempt} again"})
        return is_taken

    def _continues(self, running: Mapping[str, Any]) -> bool:
        """Whether this is the coordinator of an attempt that a node runs, or may become it."""
        if self._evaluator is None:
            return self._phase is _RunPhase.GATHERING and self._spec.elastic is not None
        is_same = (running["start"]["run"], running["start"]["attempt"]) == (self._spec.run_id, self._attempt)
        return is_same and self._phase is _RunPhase.RUNNING

    def _adopt(self, start: Mapping[str, Any], joining: Node, training: int, now: float) -> bool:
        """Continues the attempt of nodes that have lost an earlier coordinator; returns whether it can."""
        spec = dataclasses.replace(self._spec, run_id=str(start["run"]), run_seed=int(start["seed"]))
        roles, absent = spec.roles(int(start["workers"])), []
        for rank, ranks in start["nodes"]:
            host = host_and_port(start["addresses"][ranks[0]])[0]
            ports = tuple(host_and_port(start["addresses"][own_rank])[1] for own_rank in ranks)
            own_roles = {int(own_rank): roles[int(own_rank)] for own_rank in ranks}
            absent.append(
                dataclasses.replace(
                    joining, rank=int(rank), address=host, share=len(ranks), roles=own_roles, ports=ports, outcome=None
                )
            )
        evaluator = AttemptEvaluator(spec, int(start["all_workers"]))
        attempt = int(start["attempt"])
        tracker = AttemptTracker(
            attempt,
            [],
            roles,
            now=now,
            least=spec.elastic or 0,
            absent=absent,
            silent_node_seconds=spec.start_timeout_seconds,
        )
        if not tracker.take_back(joining, training=training):
            return False
        self._spec, self._evaluator, self._attempt, self._tracker = spec, evaluator, attempt, tracker
        self._start = {**start, "may_restart": evaluator.may_restart}
        self._phase = _RunPhase.RUNNING
        self._broadcast({"type": "notice", "text": f"{joining.name} runs attempt {self._attempt}, which continues"})
        return True

    def handle(self, node: Node, message: Mapping[str, Any], *, now: float) -> None:
        """Handles a message of a node. ValueError, KeyError and TypeError mean that it is malformed."""
        node.heard_at = now
        kind, tracker = message["type"], self._tracker
        if kind == "heartbeat":
            node.suspects = bool(message["suspects"])
        elif kind == "stop":
            self._stop(node, int(message["signal"]), bool(message["again"]), now)
        elif kind == "ready" and self._phase is _RunPhase.PREPARING and message["round"] == self._round:
            ports = tuple(int(port) for port in message["ports"])
            if len(ports) != len(node.roles) or not all(0 < port < 65_536 for port in ports):
                raise ValueError("invalid ports")
            node.ports = ports
        elif kind in REPORTS and tracker is not None and message["attempt"] == self._attempt and node.is_running:
            grace_periods = self._spec.grace_periods(may_restart=False)
            answer = tracker.receive(node, message, grace_periods=grace_periods, now=now)
            if answer is not None:
                self._send(node, answer)

    def lose(self, node: Node, reason: str, *, is_silent: bool = False, now: float) -> None:
        """Removes a node whose connection is closed, which is silent, or which sent a malformed message."""
        if self._membership.remove(node):
            self._handle_loss(node, reason, now, is_silent=is_silent)

    def tick(self, *, now: float) -> None:
        limit = self._spec.heartbeat_timeout
        while self._broken:
            node, reason = self._broken.pop()
            self.lose(node, reason, now=now)
        for node in self._membership.nodes:
            if limit and now - node.heard_at >= limit:
                self.lose(node, f"no heartbeat for {limit:g} s", is_silent=True, now=now)
        if self._phase is _RunPhase.GATHERING:
            self._gather(now)
        if self._phase is _RunPhase.PREPARING:
            self._start_when_ready(now)
        if self._phase is _RunPhase.RUNNING and self._tracker is not None:
            self._watch(self._tracker, now)
        if now >= self._heartbeat_at:
            self._heartbeat_at = now + self._spec.heartbeat_seconds
            self._broadcast({"type": "heartbeat"})

    def abort(self, reason: str) -> None:
        self._finish(LOST_RUN_EXIT_CODE, [reason])

    def _gather(self, now: float) -> None:
        """Starts a round when enough nodes are present."""
        if now < self._not_before:
            return
        missing, least = self._membership.missing, self._spec.min_workers
        is_first = self._evaluator is None
        if missing and (is_first or least is None or self._membership.workers < least):
            names = ", ".join(f"node {rank}" for rank in missing)
            if now >= self._deadline:
                again = "" if is_first else " again"
                lines = [f"not started: {names} did not join{again} within {self._joining_seconds:g} s"]
                self._finish(self._last_code, lines)
            elif missing != self._reported_missing:
                self._reported_missing = missing
                self._broadcast({"type": "notice", "text": f"waiting for {names}"})
            return
        all_workers = self._membership.all_workers
        for option, number in (("--min-workers", least), ("--elastic", self._spec.elastic)):
            if is_first and number is not None and number > all_workers:
                line = (
                    f"error: {option} exceeds --workers. Received: {option} {number}. Expected: at most {all_workers}, "
                    "the workers of all hosts. Correct one of them."
                )
                self._finish(2, [line])
                return
        self._reported_missing = []
        if sum(map(self._share_of, self._membership.nodes)) < (least or 1):
            self._left_out = {}  # other nodes were present when it was decided
        self._round += 1
        for node in self._membership.nodes:
            node.share, node.roles = self._share_of(node), {}
            node.ports, node.outcome, node.suspects = None, None, False
        nodes = [node for node in self._membership.nodes if node.share]
        for node, node.roles in zip(nodes, self._spec.roles_of_nodes([node.share for node in nodes]), strict=True):
            self._send(node, {"type": "prepare", "round": self._round, "processes": len(node.roles)})
        if nodes:
            self._phase, self._ready_by = _RunPhase.PREPARING, now + _READY_SECONDS

    @property
    def _joining_seconds(self) -> float:
        """How long to wait for missing nodes."""
        spec, has_started = self._spec, self._evaluator is not None
        return spec.rejoin_timeout if has_started and spec.rejoin_timeout is not None else spec.start_timeout_seconds

    def _share_of(self, node: Node) -> int:
        return max(0, node.workers - self._left_out.get(node.rank, 0))

    def _start_when_ready(self, now: float) -> None:
        nodes = [node for node in self._membership.nodes if node.share]
        if any(node.ports is None for node in nodes):
            for node in nodes if now >= self._ready_by else ():
                if node.ports is None:
                    self.lose(node, "it did not get ready", now=now)
            return
        all_workers = self._membership.all_workers
        if self._evaluator is None:
            self._evaluator = AttemptEvaluator(self._spec, all_workers)
        roles = {rank: role for node in nodes for rank, role in node.roles.items()}
        self._tracker = AttemptTracker(
            self._attempt,
            nodes,
            roles,
            now=now,
            least=self._spec.elastic or 0,
            silent_node_seconds=self._spec.start_timeout_seconds,
        )
        self._sent_order, self._sent_changes = None, _NO_CHANGES
        self._phase = _RunPhase.RUNNING
        self._start = {
            "type": "start",
            "run": self._spec.run_id,
            "seed": self._spec.run_seed,
            "nodes": [[node.rank, list(node.roles)] for node in nodes],
            "attempt": self._attempt,
            "addresses": self._membership.addresses(),
            "workers": sum(node.share for node in nodes),
            "all_workers": all_workers,
            "parameter_servers": self._spec.parameter_servers,
            "has_chief": self._spec.chief,
            "is_elastic": self._spec.elastic is not None,
            "joins_late": False,
            "may_restart": self._evaluator.may_restart,
        }
        for node in nodes:
            self._send(node, {**self._start, "ranks": list(node.roles)})
        shares = ", ".join(f"{node.name}: {node.share}" for node in nodes)
        text = f"attempt {self._attempt}: {describe_jobs(roles.values())} ({shares})"
        self._broadcast({"type": "notice", "text": text})

    def _watch(self, tracker: AttemptTracker, now: float) -> None:
        running = [node for node in self._membership.nodes if node.is_running]
        silence = SUSPICIOUS_HEARTBEATS * self._spec.heartbeat_seconds
        suspects = any(node.suspects or now - node.heard_at >= silence for node in running)
        tracker.check(suspects=suspects, grace_periods=self._spec.grace_periods(may_restart=False), now=now)
        if (changes := _changes(tracker)) != self._sent_changes:
            self._sent_changes = changes
            self._tell_changes(tracker, running)
        if tracker.order is not None and tracker.order != self._sent_order:
            self._sent_order = order = tracker.order
            for node in running:
                self._send(node, {"type": "shut_down", "attempt": self._attempt, **order.as_message()})
        if tracker.is_over and self._phase is _RunPhase.RUNNING:
            self._evaluate(tracker, now)

    def _tell_changes(self, tracker: AttemptTracker, nodes: Iterable[Node]) -> None:
        too_few, has_completed = _changes(tracker)
        for node in nodes:
            message = {"type": "elastic", "attempt": self._attempt}
            self._send(node, {**message, "too_few": too_few, "has_completed": has_completed})

    def _evaluate(self, tracker: AttemptTracker, now: float) -> None:
        """Ends the run, or plans the next attempt."""
        if self._evaluator is None:
            return
        outcome, present = tracker.outcome(now=now), self._membership.workers
        has_enough = self._spec.min_workers is not None and present >= self._spec.min_workers
        available = present if has_enough else self._membership.all_workers
        result = self._evaluator.evaluate(outcome, is_stopped=tracker.is_stopped, available=available)
        if result.exit_code is not None:
            self._finish(result.exit_code, result.lines, entry=result.error_entry)
            return
        self._last_code = LOST_RUN_EXIT_CODE if outcome.lost else outcome.exit_code or 1
        self._broadcast({"type": "attempt_over", "lines": result.lines, "entry": result.error_entry})
        left_out = available - result.workers
        self._left_out = workers_left_out(self._membership.nodes, outcome.failed_rank, left_out)
        for node in self._membership.nodes:
            node.share = 0
        ended_at = now if tracker.ordered_at is None else tracker.ordered_at
        self._not_before, self._deadline = ended_at + result.delay_seconds, now + self._joining_seconds
        self._attempt += 1
        self._tracker, self._phase = None, _RunPhase.GATHERING

    def _handle_loss(self, node: Node, reason: str, now: float, *, is_silent: bool = False) -> None:
        node.connection.close()
        if self.is_over:
            return
        text = f"{node.name} was lost: {reason}"
        trains_on = self._spec.elastic is not None and self._phase is _RunPhase.RUNNING
        if node.rank == 0 and not trains_on:
            self.abort(f"{text}; the run ends because the coordinator runs there")
            return
        if self._phase is _RunPhase.PREPARING:
            self._phase, self._deadline = _RunPhase.GATHERING, now + self._joining_seconds
        if self._phase is _RunPhase.RUNNING and self._tracker is not None and node.is_running:
            text += self._tracker.lose(node, text, is_silent=is_silent, now=now)
        self._broadcast({"type": "notice", "text": text})

    def _stop(self, node: Node, number: int, again: bool, now: float) -> None:
        text = f"{signal_name(number)} on {node.name}"
        if self._phase is _RunPhase.RUNNING and self._tracker is not None:
            self._tracker.stop(number, text, again=again, now=now)
        elif not self.is_over:
            self._finish(128 + number, [f"{text}: the run ends"])

    def _finish(self, code: int, lines: list[str], *, entry: dict[str, Any] | None = None) -> None:
        self._phase = _RunPhase.OVER
        self._broadcast({"type": "run_over", "code": code, "lines": lines, "entry": entry})

    def _broadcast(self, message: Mapping[str, Any]) -> None:
        for node in self._membership.nodes:
            self._send(node, message)

    def _send(self, node: Node, message: Mapping[str, Any]) -> None:
        try:
            node.connection.send(message)
        except ConnectionClosedError as closed:
            self._broken.append((node, str(closed)))


def _changes(tracker: AttemptTracker) -> tuple[str, bool]:
    """The state of an elastic attempt that its nodes have to know: `too_few` and `has_completed`."""
    return tracker.too_few, tracker.has_completed


def _reject_running(connection: NonblockingConnection, running: Mapping[str, Any]) -> None:
    """Tells a node that has lost the coordinator that its workers are not those of the run any more."""
    reason = (
        f"Received: a host whose workers run attempt {running['start']['attempt']} of run {running['start']['run']}. "
        "Expected: the attempt that the others run. They have continued without it; start it again."
    )
    connection.send({"type": "rejected", "reason": reason, "is_final": True})
