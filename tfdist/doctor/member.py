"""A task of the examined cluster: what it knows, and what it does when the conductor asks."""

import dataclasses
import socket
import threading
from collections.abc import Callable
from typing import Any

from tfdist.cluster import ClusterConfig
from tfdist.doctor.channel import ChannelError
from tfdist.doctor.checkpoint_directory import sees_marker
from tfdist.doctor.finding import Finding
from tfdist.doctor.greeting import TOKEN_VARIABLE, About, Passport
from tfdist.doctor.libraries import own_versions
from tfdist.doctor.link import Link, measure
from tfdist.doctor.peers import Peers
from tfdist.doctor.service import Service
from tfdist.doctor.situation import Situation


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What the conductor has found, as it tells the others.

    Args:
        conductor: The task that has the report.
        errors: Number of errors on all tasks.
        warnings: Number of warnings on all tasks.
    """

    conductor: str
    errors: int
    warnings: int


class Member:
    """This task among the others.

    Args:
        situation: Its cluster and machine.
        config: The cluster.
        server: The listening socket of its port, or None where that is taken.
        clock: Tells the time of this machine, in seconds since 1970.
    """

    def __init__(
        self,
        situation: Situation,
        config: ClusterConfig,
        server: socket.socket | None,
        *,
        clock: Callable[[], float],
    ) -> None:
        self.situation, self.clock = situation, clock
        self.task = situation.task
        self.conductor = next(iter(situation.addresses))
        self.about = About(self.task, socket.gethostname(), own_versions())
        token = situation.environ.get(TOKEN_VARIABLE, "").strip()
        passport = Passport(self.about, config.cluster, token)
        others = {task: address for task, address in situation.addresses.items() if task != self.task}
        self.peers = Peers(others, passport)
        self.findings: list[Finding] | None = None
        self.verdict: Verdict | None = None
        self.told = threading.Event()
        self.service: Service | None = None
        if server is not None:
            duties = {name: getattr(self, f"_{name}") for name in ("state", "conclude", "report", "measure", "look")}
            self.service = Service(
                server,
                passport,
                conductor=self.conductor,
                clock=clock,
                duties={**duties, "verdict": self._hear},
                max_peers=len(others),
            )

    @property
    def is_conductor(self) -> bool:
        """Whether this is the first task, which asks all others."""
        return self.task == self.conductor

    @property
    def visitors(self) -> frozenset[str]:
        """The tasks that have reached this one."""
        return frozenset() if self.service is None else frozenset(self.service.visitors)

    @property
    def has_been_left(self) -> bool:
        """Whether the conductor had come, and has gone."""
        return self.service is not None and self.service.conductor_left

    @property
    def is_without_conductor(self) -> bool:
        """Whether the conductor will not ask this task any more: it has gone, or neither has reached the other."""
        if self.service is None or self.has_been_left:
            return True
        channel = self.peers.all[self.conductor].channel
        return self.conductor not in self.visitors if channel is None else not channel.is_open

    def findings_of_machine(self, findings: list[Finding]) -> None:
        """Takes what was found on this machine: from now on the conductor may ask for it."""
        self.findings = findings

    def close(self) -> None:
        """Ends all connections and frees the port."""
        self.peers.close()
        if self.service is not None:
            self.service.close()

    def measure(self, task: str, *, with_bandwidth: bool) -> Link:
        """Measures the connection to another task.

        Raises:
            ChannelError: If it has not answered, or is gone.
        """
        peer = self.peers.all.get(task)
        if peer is None or peer.channel is None:
            raise ChannelError(f"{task} has not answered {self.task}")
        return measure(self.task, task, peer.channel, self.clock, with_bandwidth=with_bandwidth)

    def _state(self, request: dict[str, Any]) -> dict[str, Any]:
        del request
        return {"checked": self.findings is not None, "dialed": self.peers.is_done}

    def _conclude(self, request: dict[str, Any]) -> dict[str, Any]:
        del request
        self.peers.stop_waiting()
        return {}

    def _report(self, request: dict[str, Any]) -> dict[str, Any]:
        del request
        return {"findings": [found.to_json() for found in self.findings or ()], "missing": self.peers.missing}

    def _measure(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            return self.measure(str(request.get("peer")), with_bandwidth=bool(request.get("bandwidth"))).to_json()
        except ChannelError as error:
            return {"error": str(error)}

    def _look(self, request: dict[str, Any]) -> dict[str, Any]:
        directory = self.situation.checkpoints
        return {"seen": None if directory is None else sees_marker(directory, str(request.get("name")))}

    def _hear(self, request: dict[str, Any]) -> dict[str, Any]:
        errors, warnings = (request.get(name) for name in ("errors", "warnings"))
        if isinstance(errors, int) and isinstance(warnings, int):
            self.verdict = Verdict(self.conductor, errors, warnings)
            self.told.set()
        return {}
