"""Connects this task to all other tasks: what it proves to them and says about itself, and why one has not answered."""

import dataclasses
import hashlib
import json
import socket
import threading
import time
from collections.abc import Mapping

from tfdist.cluster import ClusterSpec
from tfdist.doctor.check_context import host_of
from tfdist.transport.blocking_connection import BlockingConnection, close_socket
from tfdist.transport.handshake import Credentials
from tfdist.transport.transport_errors import (
    ClusterMismatchError,
    FrameError,
    HandshakeError,
    InvalidProofError,
    ProtocolMismatchError,
    TokenRejectedError,
    TransportError,
)
from tfdist.utils.cores_and_ports import host_and_port
from tfdist.utils.formatting import printable

PROTOCOL = 2
TOKEN_VARIABLE = "TFDIST_TOKEN"
_MAX_VERSIONS = 16
_CONNECT_SECONDS = 5.0
_HANDSHAKE_SECONDS = 5.0
_PAUSE_SECONDS = 0.2
_MISMATCH_SECONDS = 20.0  # long enough for the other task to see the mismatch as well, and to report it

# Why a peer has not answered. `link_checks` finds the remedy by how a reason begins.
NOT_TRIED = "no attempt to connect yet"
RESOLVING = "its name is still being resolved"
REFUSED = "connection refused: no process listens on that port"
NOT_DOCTOR = "a program other than tfdist doctor answers"
OTHER_CLUSTER = "its description of the cluster differs from that of this task"
OTHER_TOKEN = f"its {TOKEN_VARIABLE} differs from that of this task"
OTHER_PROTOCOL = "its version of tfdist is incompatible with that of this task"
_UNKNOWN = "the name"
MISMATCHES = (OTHER_CLUSTER, OTHER_TOKEN, OTHER_PROTOCOL)
"""Reasons that seldom go away by waiting."""


@dataclasses.dataclass(frozen=True)
class TaskInfo:
    """What a task says about itself."""

    task: str  # its name, for example `"worker 1"`
    host: str  # its hostname
    versions: Mapping[str, str]  # versions of Python and the libraries, by name

    @classmethod
    def from_json(cls, document: object) -> "TaskInfo":
        """Reads what another task sent; raises a FrameError for anything else."""
        message = document if isinstance(document, dict) else {}
        task, versions = message.get("task"), message.get("versions")
        if not isinstance(versions, dict) or len(versions) > _MAX_VERSIONS or not isinstance(task, str):
            raise FrameError("the message does not describe a task")
        shown = {printable(name)[:40]: printable(version)[:40] for name, version in versions.items()}
        return cls(printable(task)[:40], printable(message.get("host", ""))[:255], shown)

    def exchange(self, connection: BlockingConnection, timeout_seconds: float) -> "TaskInfo":
        """Sends this description and returns that of the other side; without one it raises a TransportError."""
        connection.send(dataclasses.asdict(self), timeout_seconds)
        return self.from_json(connection.receive(timeout_seconds))


def doctor_credentials(cluster: ClusterSpec, token: str = "") -> Credentials:
    """Returns the credentials of a task.

    Without a token the cluster's description is the secret: that excludes port scanners and the tasks of other
    clusters, but nobody who knows the cluster's addresses.
    """
    description = json.dumps({job: list(addresses) for job, addresses in cluster.jobs.items()}, sort_keys=True)
    digest = hashlib.sha256(description.encode()).hexdigest()
    return Credentials("tfdist doctor", PROTOCOL, token, cluster=digest)


@dataclasses.dataclass
class Peer:
    """Another task, as this task sees it."""

    task: str  # its name, for example `"worker 1"`
    address: str  # its `"host:port"`
    connection: BlockingConnection | None = None  # the connection to it, once it has answered
    info: TaskInfo | None = None  # what it says about itself, once it has answered
    reason: str = NOT_TRIED  # why the last attempt to connect failed


class PeerConnections:
    """Connections to the other tasks. One thread dials each task, because resolving a name has no time limit.

    If `names_are_fixed`, a name that does not resolve now never will: those of Slurm's nodes, not of pods.
    """

    def __init__(
        self, addresses: Mapping[str, str], info: TaskInfo, credentials: Credentials, *, names_are_fixed: bool = False
    ) -> None:
        self.all = {task: Peer(task, address) for task, address in addresses.items()}
        self._info, self._credentials, self._names_are_fixed = info, credentials, names_are_fixed
        self._is_last_try = threading.Event()
        self._threads: tuple[threading.Thread, ...] | None = None

    def dial(self, timeout_seconds: float) -> None:
        """Starts to dial all tasks, for `timeout_seconds`."""
        deadline = time.monotonic() + timeout_seconds
        threads = tuple(
            threading.Thread(target=self._dial, args=(peer, deadline), name=f"dial {peer.task}", daemon=True)
            for peer in self.all.values()
        )
        for thread in threads:
            thread.start()
        self._threads = threads  # not earlier: a thread that has not started is not alive either

    def stop_waiting(self) -> None:
        """Tries once more to reach the tasks that have not answered, then gives up."""
        self._is_last_try.set()

    @property
    def is_done(self) -> bool:
        """Whether every task has answered or been given up."""
        threads = self._threads
        return threads is not None and not any(thread.is_alive() for thread in threads)

    def wait(self, timeout_seconds: float) -> bool:
        """Waits at most `timeout_seconds` until `is_done`, and returns that."""
        deadline = time.monotonic() + timeout_seconds
        for thread in self._threads or ():
            thread.join(max(0.0, deadline - time.monotonic()))
        return self.is_done

    @property
    def missing(self) -> dict[str, str]:
        """The tasks that have not answered, with the reasons."""
        return {task: peer.reason for task, peer in self.all.items() if peer.connection is None}

    @property
    def answered(self) -> dict[str, Peer]:
        return {task: peer for task, peer in self.all.items() if peer.connection is not None}

    def close(self) -> None:
        """Stops dialing and closes all connections."""
        self._is_last_try.set()
        for peer in self.all.values():
            if peer.connection is not None:
                peer.connection.close()

    def _dial(self, peer: Peer, deadline: float) -> None:
        began = time.monotonic()
        while True:
            is_last = self._is_last_try.is_set() or time.monotonic() >= deadline
            reason = self._try(peer)
            # A peer that sees the mismatch reports it and exits: the mismatch says more than its later absence.
            peer.reason = peer.reason if reason and reason not in MISMATCHES and peer.reason in MISMATCHES else reason
            is_unknown = self._names_are_fixed and peer.reason.startswith(_UNKNOWN)
            is_final = peer.reason in MISMATCHES or is_unknown
            if not peer.reason or is_last or (is_final and time.monotonic() >= began + _MISMATCH_SECONDS):
                return
            self._is_last_try.wait(_PAUSE_SECONDS)

    def _try(self, peer: Peer) -> str:
        """Dials a task once; returns why that failed, or an empty string."""
        peer.reason = RESOLVING if peer.reason == NOT_TRIED else peer.reason
        host = host_of(peer.address)
        try:
            opened = socket.create_connection((host, host_and_port(peer.address)[1]), timeout=_CONNECT_SECONDS)
        except ConnectionRefusedError:
            return REFUSED
        except TimeoutError:
            return f"no answer in {_CONNECT_SECONDS:g} s: the host is down, or a firewall drops the packets"
        except socket.gaierror as error:
            return f"{_UNKNOWN} {host} does not resolve ({error.strerror})"
        except (OSError, UnicodeError) as error:
            return str(getattr(error, "strerror", None) or error)
        try:
            connection = BlockingConnection.connect(opened, self._credentials, timeout_seconds=_HANDSHAKE_SECONDS)
            info = self._info.exchange(connection, _HANDSHAKE_SECONDS)
        except TransportError as error:
            close_socket(opened)
            return _reason_of(error)
        if info.task != peer.task:
            connection.close()
            return f"{info.task} answers there instead: an address or an index is wrong"
        peer.info, peer.connection = info, connection
        return ""


def _reason_of(error: TransportError) -> str:
    match error:
        case ClusterMismatchError():
            return OTHER_CLUSTER
        case TokenRejectedError() | InvalidProofError():
            return OTHER_TOKEN
        case ProtocolMismatchError():
            return OTHER_PROTOCOL
        case FrameError() | HandshakeError():
            return NOT_DOCTOR
    return f"the program there does not answer as tfdist doctor ({error}): it is another program, or it hangs"
