"""This host's end of the run over several hosts: what its supervisor hears from the coordinator and tells it."""

import dataclasses
import select
import time
from collections.abc import Callable, Mapping
from typing import Any

from tfdist.cluster.exit_codes import LOST_RUN_EXIT_CODE
from tfdist.launch.errors import UsageError
from tfdist.launch.nodes.link import Link, LinkClosed
from tfdist.launch.nodes.looks import Looks
from tfdist.launch.nodes.outcomes import encode
from tfdist.launch.others import Order
from tfdist.launch.outcome import Outcome
from tfdist.launch.ports import ReservedPorts
from tfdist.launch.stop_signals import StopSignals

_JOIN_SECONDS = 20.0
_LOOK_SECONDS = 0.25
# The first ends the workers, the second kills them; whoever sends a third does not want to wait for other hosts.
_PATIENT_SIGNALS = 2


@dataclasses.dataclass(frozen=True)
class Start:
    """What is started in an attempt.

    Args:
        attempt: Its number, 0 first.
        first_rank: The rank of this host's first worker.
        own_workers: How many of the workers are this host's.
        workers: `host:port` of all workers, by rank.
        all_workers: How many workers all hosts were asked for; 0: as this host.
        run_id: What tells the run from others; empty: as this host says.
        may_restart: Whether a failure may be followed by a restart.
    """

    attempt: int
    first_rank: int
    own_workers: int
    workers: tuple[str, ...]
    all_workers: int = 0
    run_id: str = ""
    may_restart: bool = False


@dataclasses.dataclass(frozen=True)
class End:
    """The end of the run, as all hosts are told it.

    Args:
        code: The exit code.
    """

    code: int


class Membership:
    """The connection to the coordinator once this host has been taken in.

    Args:
        link: To the coordinator.
        address: Where other hosts reach this host's workers, or None: where the link leaves from.
        say: Shows lines to the user.
        write: Writes what an error file says, and returns why it could not, or an empty string.
    """

    def __init__(
        self,
        link: Link,
        address: str | None,
        *,
        say: Callable[..., None],
        write: Callable[[Mapping[str, Any]], str],
    ) -> None:
        self._link, self._say, self._write = link, say, write
        self.address = address or link.local_address
        self.run_id = ""
        self.order: Order | None = None  # what the coordinator wants of the present attempt
        self._beat_seconds, self._limit = 1.0, 0.0
        self._looks = Looks(now=time.monotonic())
        self._heard_at = self._beat_at = 0.0
        self._reserved: ReservedPorts | None = None
        self._start: Start | None = None  # what the supervisor has not asked for yet
        self._end: End | None = None
        self._attempt: int | None = None  # the one that runs
        self._has_told_echo = self._suspects = False
        self._stops_told = 0

    def join(self, said: Mapping[str, Any]) -> None:
        """Says who this host is, and waits until it is taken in.

        Raises:
            UsageError: If it is refused, or not answered.
        """
        until = time.monotonic() + _JOIN_SECONDS
        try:
            self._link.send({**said, "address": self.address})
            while True:
                select.select([self._link], [], [], max(0.0, until - time.monotonic()))
                for answer in self._link.receive():
                    self._take_answer(answer)
                    return
                if time.monotonic() >= until:
                    raise LinkClosed("it does not answer")
        except LinkClosed as closed:
            raise UsageError(
                f"The rendezvous has not taken this host in. Received: {closed}. Expected: an answer. Look at what "
                "node 0 says."
            ) from closed

    @property
    def descriptor(self) -> int | None:
        """What becomes readable when the coordinator says something; None when it was lost."""
        return self._link.fileno() if self.is_connected else None

    @property
    def is_connected(self) -> bool:
        """Whether the coordinator can be heard."""
        return self._link.fileno() >= 0

    def wait_for_start(self, signals: StopSignals) -> Start | End:
        """Waits until the coordinator starts an attempt, or ends the run."""
        while self._start is None and self._end is None:
            self._wait(signals)
        start, self._start = self._start, None
        if self._end is not None or start is None:
            return self._end or End(LOST_RUN_EXIT_CODE)
        return start

    def finish(self, outcome: Outcome, signals: StopSignals) -> None:
        """Tells how the attempt ended here, and waits until it has ended everywhere."""
        self._tell({"type": "done", "attempt": self._attempt, "outcome": encode(outcome)})
        finished = self._attempt
        while self._attempt == finished and self._end is None:
            self._wait(signals)

    def exchange(self, *, suspects: bool = False) -> None:
        """Hears and tells what there is; to be called several times a second.

        Args:
            suspects: Whether a worker of this host may be about to be found frozen.
        """
        if not self.is_connected:
            return
        try:
            for said in self._link.receive():
                self._heard_at = self._looks.at(time.monotonic())
                self._take(said)
            now = self._looks.at(time.monotonic())
            if self._limit and now - self._heard_at >= self._limit:
                raise LinkClosed(f"no sign of life for {self._limit:g} s")
            if now >= self._beat_at or suspects != self._suspects:
                self._beat_at, self._suspects = now + self._beat_seconds, suspects
                self._link.send({"type": "beat", "suspects": suspects})
            self._link.flush()
        except (LinkClosed, KeyError, TypeError, ValueError) as error:
            self._lose(str(error))

    def tell_failure(self, text: str) -> None:
        """Tells at once of a failure that is a cause of its own."""
        self._tell({"type": "failed", "attempt": self._attempt, "text": text})

    def tell_echo(self, text: str) -> bool:
        """Tells of a failure that only speaks of a lost peer; the coordinator then says whether to end.

        Returns:
            Whether it can.
        """
        if not self._has_told_echo:
            self._has_told_echo = True
            self._tell({"type": "echo", "attempt": self._attempt, "text": text})
        return self.is_connected

    def tell_stop(self, received: list[int]) -> None:
        """Tells of the signals that this supervisor was sent, each once."""
        for number, signal_number in enumerate(received):
            if number >= self._stops_told:
                self._tell({"type": "stop", "signal": int(signal_number), "again": signal_number in received[:number]})
        self._stops_told = max(self._stops_told, len(received))

    def close(self) -> None:
        """Leaves."""
        self._release()
        if self.is_connected:
            self._link.close()

    def _wait(self, signals: StopSignals) -> None:
        poll = select.poll()
        for fd in (signals.fd, self.descriptor):
            if fd is not None:
                poll.register(fd, select.POLLIN)
        poll.poll(1000 * min(_LOOK_SECONDS, self._beat_seconds))
        signals.clear_wakeup()
        self.tell_stop(signals.received)
        self.exchange()
        if len(signals.received) > _PATIENT_SIGNALS and self._end is None:
            self._lose("it did not answer to the signals")

    def _take_answer(self, answer: Mapping[str, Any]) -> None:
        if answer.get("type") == "refused":
            raise UsageError(f"The rendezvous refuses this host. {answer.get('reason')}")
        self.run_id = str(answer["run"])
        self._beat_seconds, self._limit = float(answer["beat_seconds"]), float(answer["silence_limit"])
        self._heard_at = self._looks.at(time.monotonic())

    def _take(self, said: Mapping[str, Any]) -> None:
        kind = said["type"]
        if kind == "news":
            self._say(str(said["text"]))
        elif kind == "prepare":
            self._release()
            self._reserved = ReservedPorts(int(said["workers"]))
            self._tell({"type": "ready", "round": said["round"], "ports": list(self._reserved.ports)})
        elif kind == "start":
            own = 0 if self._reserved is None else len(self._reserved.ports)
            addresses = tuple(str(address) for address in said["workers"])
            first, everyone = int(said["first_rank"]), int(said["all_workers"])
            attempt, may_restart = int(said["attempt"]), bool(said["may_restart"])
            self._start = Start(attempt, first, own, addresses, everyone, self.run_id, may_restart)
            self._release()
            # Here, not when the supervisor asks for it: the order to end it may come right behind.
            self._attempt, self.order, self._has_told_echo = self._start.attempt, None, False
        elif kind == "end" and said["attempt"] == self._attempt:
            number = said["signal"]
            self.order = Order(str(said["reason"]), None if number is None else int(number), bool(said["kill"]))
        elif kind in ("settled", "over"):
            self._say(*(str(line) for line in said["lines"]))
            trouble = "" if said["entry"] is None else self._write(said["entry"])
            self._say(*([trouble] if trouble else []))
            self._attempt = None
            if kind == "over":
                self._end = End(int(said["code"]))
                self.order = self.order or Order("the run has ended")

    def _tell(self, message: Mapping[str, Any]) -> None:
        if self.is_connected:
            try:
                self._link.send(message)
            except LinkClosed as closed:
                self._lose(str(closed))

    def _lose(self, reason: str) -> None:
        self._link.close()
        self._release()
        if self._end is None:
            text = f"the rendezvous was lost ({reason})"
            self._say(f"{text}: this host ends its workers (exit code {LOST_RUN_EXIT_CODE})")
            self._end = End(LOST_RUN_EXIT_CODE)
            self.order = Order(text)

    def _release(self) -> None:
        if self._reserved is not None:
            self._reserved.release()
            self._reserved = None
