"""The run policy of one node of several: joins a run, which a coordinator decides; its messages and answers."""

import contextlib
import dataclasses
import math
import select
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tfdist.cluster import LOST_RUN_EXIT_CODE
from tfdist.launch.processes.output import Console
from tfdist.launch.processes.run_policy import AttemptStart, RunPolicy, ShutdownOrder
from tfdist.launch.processes.stop_signals import StopSignals
from tfdist.launch.rendezvous.coordinator_process import CoordinatorProcess, rendezvous_credentials
from tfdist.launch.rendezvous.membership import SUSPICIOUS_HEARTBEATS
from tfdist.launch.rendezvous.reconnection import Reconnection
from tfdist.launch.restart.attempt_outcome import ErrorFile, Outcome, encode_outcome
from tfdist.launch.restart.elastic_workers import describe_too_few
from tfdist.launch.restart.restart_policy import AttemptEvaluator
from tfdist.launch.run_spec import NodeOptions, RunSpec, count_workers, run_roles
from tfdist.transport.nonblocking_connection import NonblockingConnection, dial
from tfdist.transport.transport_errors import (
    ConnectionClosedError,
    InvalidProofError,
    ProtocolMismatchError,
    TokenRejectedError,
)
from tfdist.utils.active_clock import ActiveClock
from tfdist.utils.argument_checks import UsageError
from tfdist.utils.cores_and_ports import ReservedPorts

_JOIN_SECONDS = 20.0
_POLL_SECONDS = 0.25
# The first signal ends the workers, the second kills them; a third means that the user does not wait for other hosts.
_MAX_SIGNALS = 2


class NodeClient(RunPolicy):
    """The connection of a supervisor to the coordinator.

    When it is lost while elastic workers train, they train on: this node is *alone*, decides by itself, and connects
    again as soon as there is a coordinator, also a new one.

    Args:
        connection: The connection.
        address: Where other nodes reach this node's workers; None: the local address of the connection.
        console: Shows messages.
        error_file: Gets the cause of a failure.
        spec: The run.
        reconnection: Connects again; None: nothing does.
    """

    def __init__(
        self,
        connection: NonblockingConnection,
        address: str | None,
        *,
        console: Console,
        error_file: ErrorFile,
        spec: RunSpec,
        reconnection: Reconnection | None = None,
    ) -> None:
        self._connection, self._console, self._error_file = connection, console, error_file
        self._spec, self._reconnection = spec, reconnection
        self.address = address or connection.local_address
        self.run_id, self._seed = "", 0
        self._heartbeat_seconds, self._heartbeat_timeout = 1.0, 0.0
        self._clock = ActiveClock(now=time.monotonic())
        self._heard_at = self._heartbeat_at = 0.0
        self._reserved: ReservedPorts | None = None
        self._start: AttemptStart | None = None  # not yet passed to the supervisor
        self._exit_code: int | None = None  # None: the run has not ended
        self._attempt: int | None = None  # the running one
        self._has_reported_lost_peer = self._suspects_freeze = self._has_other_workers = False
        self._sent_training: dict[str, Any] = {}
        self._request: Mapping[str, Any] = {}
        self._start_message: Mapping[str, Any] = {}
        self._is_alone = self._has_reported_completion = False
        self._without_worker_since: float | None = None  # while it is alone, since when none of its workers trains
        self._rejection = "", 0.0  # while it is alone, why it was rejected last, and when to say so
        self._stops_sent = 0

    def join(self, request: Mapping[str, Any]) -> None:
        """Asks to join, and waits for the answer. Raises a UsageError if the coordinator rejects this node."""
        deadline = time.monotonic() + _JOIN_SECONDS
        self._request = {**request, "address": self.address}
        try:
            self._connection.send(self._request)
            while True:
                select.select([self._connection], [], [], max(0.0, deadline - time.monotonic()))
                for answer in self._connection.receive():
                    self._take_answer(answer)
                    return
                if time.monotonic() >= deadline:
                    raise ConnectionClosedError("no answer")
        except ConnectionClosedError as closed:
            raise UsageError(
                f"This host could not join the run. Received: {closed}. Expected: an answer of the coordinator. Read "
                "the output of node 0."
            ) from closed

    @property
    def descriptor(self) -> int | None:
        return self._connection.fileno() if self.is_connected else None

    @property
    def is_connected(self) -> bool:
        return self._connection.fileno() >= 0

    def next_attempt(self, signals: StopSignals) -> AttemptStart | int:
        while self._exit_code is None:
            start, self._start = self._start, None
            if start is None:
                self._wait(signals)
                continue
            if start.attempt == 0 and not start.joins_late:  # a node that joins again is in the middle of a run
                with contextlib.suppress(OSError):
                    self._error_file.clear()
            return start
        return self._exit_code

    def attempt_ended(self, outcome: Outcome, signals: StopSignals) -> None:
        if not self._is_alone:
            self._send({"type": "done", "attempt": self._attempt, "outcome": encode_outcome(outcome)})
        finished = self._attempt
        while self._attempt == finished and self._exit_code is None and not self._is_alone:
            self._wait(signals)
        if self._is_alone:
            self._end_alone(outcome, signals)

    def poll(self, *, suspects_freeze: bool = False) -> None:
        if self._is_alone and not self.is_connected and self._exit_code is None:
            self._join_again()
        if not self.is_connected:
            return
        try:
            for message in self._connection.receive():
                self._heard_at = self._clock.advance(time.monotonic())
                self._handle(message)
            now = self._clock.advance(time.monotonic())
            if self._heartbeat_timeout and now - self._heard_at >= self._heartbeat_timeout:
                raise ConnectionClosedError(f"no heartbeat for {self._heartbeat_timeout:g} s")
            if now >= self._heartbeat_at or suspects_freeze != self._suspects_freeze:
                self._heartbeat_at, self._suspects_freeze = now + self._heartbeat_seconds, suspects_freeze
                self._connection.send({"type": "heartbeat", "suspects": suspects_freeze})
            self._connection.flush()
        except (ConnectionClosedError, KeyError, TypeError, ValueError) as error:
            self._disconnect(str(error))

    def report_failure(self, text: str) -> None:
        self._send({"type": "failed", "attempt": self._attempt, "text": text})

    def report_lost_peer(self, text: str) -> bool:
        if not self._has_reported_lost_peer:
            self._has_reported_lost_peer = True
            self._send({"type": "lost_peer", "attempt": self._attempt, "text": text})
        return self.is_connected

    @property
    def has_other_workers(self) -> bool:
        """Whether other hosts have workers, as far as this host knows."""
        return self._has_other_workers

    def report_no_worker(self) -> None:
        self._send({"type": "no_worker", "attempt": self._attempt})

    def report_training(self, count: int, *, has_failure: bool, living: int | None) -> None:
        training = {"count": count, "has_failure": has_failure}
        if self._is_alone:
            self._sent_training = training
            self._count_alone(count, living, has_failure=has_failure)
        elif training != self._sent_training:
            self._sent_training = training
            self._send({"type": "training", "attempt": self._attempt, **training})

    def report_completion(self) -> None:
        self._has_reported_completion = True
        self._send({"type": "completed", "attempt": self._attempt})

    def report_signals(self, received: Sequence[int]) -> None:
        for index, number in enumerate(received):
            if index >= self._stops_sent:
                self._send({"type": "stop", "signal": int(number), "again": number in received[:index]})
        self._stops_sent = max(self._stops_sent, len(received))

    def close(self) -> None:
        self._release_ports()
        if self._reconnection is not None:
            self._reconnection.close()
        if self.is_connected:
            self._connection.close()

    def _wait(self, signals: StopSignals) -> None:
        poll = select.poll()
        for fd in (signals.fd, self.descriptor):
            if fd is not None:
                poll.register(fd, select.POLLIN)
        poll.poll(1000 * min(_POLL_SECONDS, self._heartbeat_seconds))
        signals.clear_wakeup()
        self.report_signals(signals.received)
        self.poll()
        if len(signals.received) > _MAX_SIGNALS and self._exit_code is None:
            self._disconnect("no reaction to the signals")

    def _take_answer(self, answer: Mapping[str, Any]) -> None:
        if answer.get("type") == "rejected":
            raise UsageError(f"The rendezvous rejects this host. {answer.get('reason')}")
        self.run_id, self._seed = str(answer["run"]), int(answer["seed"])
        self._heartbeat_seconds = float(answer["heartbeat_seconds"])
        self._heartbeat_timeout = float(answer["heartbeat_timeout"])
        self._heard_at = self._clock.advance(time.monotonic())

    def _handle(self, message: Mapping[str, Any]) -> None:
        kind = message["type"]
        if kind in ("joined", "rejected") and self._is_alone:
            self._take_late_answer(message)
        elif kind == "notice":
            self._console.say_to_all(str(message["text"]))
        elif kind == "prepare":
            self._release_ports()
            self._reserved = ReservedPorts(int(message["processes"]))
            self._send({"type": "ready", "round": message["round"], "ports": list(self._reserved.ports)})
        elif kind == "start":
            self.run_id, self._seed, self._start_message = str(message["run"]), int(message["seed"]), message
            self._start = self._attempt_start(message)
            self._release_ports()
            # Set here, not in `next_attempt`: the order to shut down may already follow in the same read.
            self._attempt, self.shutdown_order, self._has_reported_lost_peer = self._start.attempt, None, False
            self.too_few, self.has_completed, self._sent_training = "", False, {}
            self._has_reported_completion = False
            self._has_other_workers = count_workers(self._start.roles) > count_workers(self._start.local_roles)
        elif kind == "elastic" and message["attempt"] == self._attempt:
            self.too_few, self.has_completed = str(message["too_few"]), bool(message["has_completed"])
        elif kind == "no_worker_left" and message["attempt"] == self._attempt:
            self._has_other_workers = False
        elif kind == "shut_down" and message["attempt"] == self._attempt:
            number = message["signal"]
            stop_signal = None if number is None else int(number)
            self.shutdown_order = ShutdownOrder(
                str(message["reason"]),
                stop_signal,
                kill=bool(message["kill"]),
                only_script=bool(message["only_script"]),
                must_save=bool(message["must_save"]),
            )
        elif kind in ("attempt_over", "run_over"):
            self._console.say_to_all(*(str(line) for line in message["lines"]))
            if (entry := message["entry"]) is not None:
                local_entry = {**entry, "attempt": int(entry["attempt"]), "host": socket.gethostname()}
                if problem := self._error_file.write(local_entry):
                    self._console.say(problem)
            self._attempt = None
            if kind == "run_over":
                self._exit_code = int(message["code"])
                self.shutdown_order = self.shutdown_order or ShutdownOrder("the run is over")

    def _attempt_start(self, message: Mapping[str, Any]) -> AttemptStart:
        servers, has_chief = int(message["parameter_servers"]), bool(message["has_chief"])
        return AttemptStart(
            int(message["attempt"]),
            run_roles(
                int(message["workers"]),
                parameter_servers=servers,
                has_chief=has_chief,
                is_elastic=bool(message["is_elastic"]),
            ),
            local_ranks=tuple(int(rank) for rank in message["ranks"]),
            addresses=tuple(str(address) for address in message["addresses"]),
            full_workers=int(message["all_workers"]),
            run_id=self.run_id,
            seed=self._seed,
            may_restart=bool(message["may_restart"]),
            joins_late=bool(message["joins_late"]),
        )

    def _send(self, message: Mapping[str, Any]) -> None:
        if self.is_connected:
            try:
                self._connection.send(message)
            except ConnectionClosedError as closed:
                self._disconnect(str(closed))

    def _disconnect(self, reason: str) -> None:
        self._connection.close()
        self._release_ports()
        if self._is_alone:
            return
        text = f"the rendezvous was lost ({reason})"
        if self._may_continue_alone:
            self._is_alone, self._without_worker_since = True, None
            self._console.say(f"{text}: the workers of this host train on; it joins again when node 0 is there")
        elif self._exit_code is None:
            self._console.say(f"{text}: this host ends its workers (exit code {LOST_RUN_EXIT_CODE})")
            self._exit_code = LOST_RUN_EXIT_CODE
            self.shutdown_order = ShutdownOrder(text)

    @property
    def _may_continue_alone(self) -> bool:
        is_elastic, is_ending = self._spec.elastic is not None, self._exit_code is not None or self.shutdown_order
        return is_elastic and self._attempt is not None and not is_ending and self._reconnection is not None

    def _join_again(self) -> None:
        assert self._reconnection is not None
        connection = self._reconnection.advance()
        if connection is not None:
            self._connection, self._heard_at = connection, self._clock.advance(time.monotonic())
            start = {name: value for name, value in self._start_message.items() if name not in ("ranks", "joins_late")}
            running = {"start": start, "training": int(self._sent_training.get("count", 0))}
            self._send({**self._request, "running": running})

    def _take_late_answer(self, answer: Mapping[str, Any]) -> None:
        """Takes the answer of a coordinator to a node that was alone."""
        if answer["type"] == "joined":
            self._is_alone, self._sent_training, self._rejection = False, {}, ("", 0.0)
            self._take_answer(answer)
            if self._has_reported_completion:
                self.report_completion()
        elif answer["is_final"]:
            self._console.say(f"the rendezvous rejects this host. {answer['reason']}")
            self._exit_code = LOST_RUN_EXIT_CODE
            self.shutdown_order = ShutdownOrder("the others have continued without this host")
            self._connection.close()
        else:
            self._connection.close()
            self._say_rejection(str(answer["reason"]))

    def _say_rejection(self, reason: str) -> None:
        """Says once why this node, which asks again, is rejected, unless that passes.

        The coordinator may not have noticed yet that this node was gone.
        """
        now, (last_reason, say_at) = self._clock.advance(time.monotonic()), self._rejection
        if reason != last_reason:
            self._rejection = reason, now + 2 * SUSPICIOUS_HEARTBEATS * self._heartbeat_seconds
        elif now >= say_at:
            self._rejection = reason, math.inf
            self._console.say(f"the rendezvous rejects this host, whose workers train on; it asks again. {reason}")

    def _count_alone(self, count: int, living: int | None, *, has_failure: bool) -> None:
        """Ends the attempt on this host if too few workers of all hosts train, as those of this host report."""
        now, least = self._clock.advance(time.monotonic()), self._spec.elastic or 0
        if count:
            self._without_worker_since = None
        elif self._without_worker_since is None:
            self._without_worker_since = now
        if self._without_worker_since is not None:  # it may still join the others
            living = None if now - self._without_worker_since < self._spec.start_timeout_seconds else 0
        if living is None or living >= least:
            return
        self.too_few = describe_too_few(living, least)
        self.shutdown_order = ShutdownOrder(self.too_few, must_save=not has_failure)

    def _end_alone(self, outcome: Outcome, signals: StopSignals) -> None:
        """Evaluates an attempt without the coordinator: no other one follows."""
        spec = dataclasses.replace(self._spec, run_id=self.run_id, max_restarts=0)
        evaluator = AttemptEvaluator(spec, int(self._start_message["all_workers"]))
        evaluation = evaluator.evaluate(outcome, is_stopped=bool(signals.received))
        self._console.say_to_all(*evaluation.lines)
        if evaluation.error_entry is not None and (problem := self._error_file.write(evaluation.error_entry)):
            self._console.say(problem)
        self._exit_code = evaluation.exit_code if self._exit_code is None else self._exit_code
        if evaluation.error_entry is not None and self._spec.max_restarts and not signals.received:
            self._console.say("no restart: the rendezvous is lost")
            self._exit_code = LOST_RUN_EXIT_CODE

    def _release_ports(self) -> None:
        if self._reserved is not None:
            self._reserved.release()
            self._reserved = None


@contextlib.contextmanager
def join_run(node: NodeOptions, spec: RunSpec, console: Console, *, error_file: ErrorFile) -> Iterator[NodeClient]:
    """Joins the run, and leaves it at the end of the `with` block, which gets the run policy of this host.

    Call this while the process has one thread. After a UsageError no worker was started.
    """
    with contextlib.ExitStack() as undo:
        has_joined = False
        if node.rank == 0:
            coordinator = CoordinatorProcess(node.host, node.port, node.token, spec, console)
            undo.callback(lambda: coordinator.close(is_graceful=has_joined))
        connection = connect_to_coordinator(
            node.host, node.port, node.token, timeout_seconds=spec.start_timeout_seconds, say=console.say
        )
        client = NodeClient(
            connection,
            node.address,
            console=console,
            error_file=error_file,
            spec=spec,
            reconnection=Reconnection(node.host, node.port, rendezvous_credentials(node.token)),
        )
        undo.callback(client.close)
        client.join(
            {
                "node": node.rank,
                "host": socket.gethostname(),
                "workers": spec.workers,
                "options": spec.common_options,
            }
        )
        console.say(f"node {node.rank} of {spec.nodes} has joined run {client.run_id}")
        has_joined = True
        yield client


def connect_to_coordinator(
    host: str, port: int, token: str, *, timeout_seconds: float, say: Callable[[str], None]
) -> NonblockingConnection:
    """Connects to the coordinator, which may not be up yet."""
    where = f"{host}:{port}"
    try:
        return dial(
            host,
            port,
            rendezvous_credentials(token),
            timeout_seconds=timeout_seconds,
            on_wait=lambda reason: say(f"waiting for the rendezvous at {where} ({reason})"),
        )
    except ProtocolMismatchError as error:
        raise UsageError(
            f"The hosts have different versions of tfdist. Received: {error}, at {where}. Expected: the same version. "
            "Install the same version of tfdist on all hosts."
        ) from error
    except TokenRejectedError as error:
        raise UsageError(
            f"The token is wrong. Received: a token that the rendezvous at {where} rejects. Expected: the token of "
            "node 0. Use the same --token-file or TFDIST_TOKEN on every host."
        ) from error
    except InvalidProofError as error:
        raise UsageError(
            f"The server at {where} does not know the token. Received: an invalid proof. Expected: node 0 of this run. "
            "Correct --rendezvous. If that is node 0, somebody intercepts the connection."
        ) from error
    except ConnectionClosedError as error:
        raise UsageError(
            f"The rendezvous did not answer. Received: {error} at {where} for {timeout_seconds:g} s. Expected: tfdist "
            "run --node-rank 0 on that host, and no firewall that blocks the port. Start node 0, correct --rendezvous, "
            "or increase --start-timeout."
        ) from error
