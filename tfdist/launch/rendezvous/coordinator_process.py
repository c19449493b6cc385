"""The process of the coordinator: a fork of node 0's supervisor, which continues while that is blocked."""

import contextlib
import os
import select
import signal
import socket
import time
import traceback

from tfdist.launch.processes.output import Console
from tfdist.launch.processes.stop_signals import STOP_SIGNALS
from tfdist.launch.rendezvous.coordinator import RunCoordinator
from tfdist.launch.rendezvous.membership import Node
from tfdist.launch.run_spec import RunSpec
from tfdist.transport.handshake import Credentials
from tfdist.transport.nonblocking_connection import HANDSHAKE_SECONDS, Listener, NonblockingConnection
from tfdist.transport.transport_errors import ConnectionClosedError
from tfdist.utils.active_clock import ActiveClock
from tfdist.utils.argument_checks import UsageError
from tfdist.utils.cores_and_ports import is_loopback, listen_on_all_interfaces
from tfdist.utils.linux_syscalls import die_with_parent, fork

PROTOCOL = 4
_POLL_SECONDS = 0.1
_FAREWELL_SECONDS = 5.0  # for all nodes to read the end of the run
_BACKLOG = 128


def rendezvous_credentials(token: str) -> Credentials:
    """Returns the credentials of a supervisor or the coordinator: the token, and the same version of tfdist."""
    return Credentials("tfdist rendezvous", PROTOCOL, token, same_version=True)


class CoordinatorProcess:
    """Starts the process and waits for its end. Create it while this process has one thread, because it forks.

    If `host` is a loopback address it serves this host only; otherwise it listens on all interfaces, as TensorFlow's
    servers do.
    """

    def __init__(self, host: str, port: int, token: str, spec: RunSpec, console: Console) -> None:
        server = _listen(host, port)
        launcher = os.getpid()
        self.pid = fork()
        if self.pid == 0:
            status = 1
            try:
                # It ends with the launcher, but ignores the signals that the launcher handles.
                die_with_parent(launcher)
                os.setsid()
                for number in STOP_SIGNALS:
                    signal.signal(number, signal.SIG_IGN)
                _serve(server, token, spec, console)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        server.close()

    def close(self, *, is_graceful: bool) -> None:
        """Ends the process; if `is_graceful`, it may first announce the end of the run to all nodes for a while."""
        deadline = time.monotonic() + (2 * _FAREWELL_SECONDS if is_graceful else 0.0)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(self.pid, os.WNOHANG)[0] == 0:
                if time.monotonic() > deadline:
                    os.kill(self.pid, signal.SIGKILL)
                    os.waitpid(self.pid, 0)
                    return
                time.sleep(_POLL_SECONDS / 2)


def _listen(host: str, port: int) -> socket.socket:
    try:
        if is_loopback(host):
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            return socket.create_server((host, port), backlog=_BACKLOG, family=family)
        return listen_on_all_interfaces(port, backlog=_BACKLOG)
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise UsageError(
            f"The coordinator cannot listen. Received: port {port} ({reason}). Expected: a free port of this host. "
            "Choose another port in --rendezvous on every host, or end the process that uses it."
        ) from error


def _serve(server: socket.socket, token: str, spec: RunSpec, console: Console) -> None:
    """Runs the coordinator until all nodes know the end of the run."""
    listener = Listener(
        server, rendezvous_credentials(token), lambda text: console.say_unless_blocked(f"rendezvous: {text}")
    )
    clock = ActiveClock(now=time.monotonic())
    coordinator = RunCoordinator(spec, now=0.0)
    joining: dict[NonblockingConnection, float] = {}  # connections that have not asked to join, with their deadlines
    nodes: dict[NonblockingConnection, Node] = {}
    farewell_at: float | None = None
    while farewell_at is None or (nodes and clock.advance(time.monotonic()) < farewell_at):
        _poll(listener, [*joining, *nodes])
        now = clock.advance(time.monotonic())
        joining |= {connection: now + HANDSHAKE_SECONDS for connection in listener.accept(now=now)}
        for connection, node in list(nodes.items()):
            _exchange(coordinator, connection, node, now)
        for connection, deadline in list(joining.items()):
            joined = _join(coordinator, connection, now)
            if joined is None and now < deadline:
                continue
            del joining[connection]
            if isinstance(joined, Node):
                nodes[connection] = joined
            else:
                connection.close()
        coordinator.tick(now=now)
        nodes = {connection: node for connection, node in nodes.items() if connection.fileno() >= 0}
        if coordinator.is_over and farewell_at is None:
            farewell_at = now + _FAREWELL_SECONDS
    listener.close()


def _poll(listener: Listener, connections: list[NonblockingConnection]) -> None:
    poll = select.poll()
    for descriptor in listener.descriptors:
        poll.register(descriptor, select.POLLIN)
    for connection in connections:
        poll.register(connection, select.POLLIN | (select.POLLOUT if connection.has_unsent else 0))
    poll.poll(_POLL_SECONDS * 1000)


def _exchange(coordinator: RunCoordinator, connection: NonblockingConnection, node: Node, now: float) -> None:
    try:
        connection.flush()
        for message in connection.receive():
            coordinator.handle(node, message, now=now)
    except ConnectionClosedError as closed:
        coordinator.lose(node, str(closed), now=now)
        connection.close()
    except (ValueError, KeyError, TypeError) as error:
        coordinator.lose(node, f"it sent a malformed message ({error!r})", now=now)
        connection.close()


def _join(coordinator: RunCoordinator, connection: NonblockingConnection, now: float) -> Node | bool | None:
    """Returns the node that has joined over a connection; None: no request yet; False: it was rejected or is gone."""
    try:
        for message in connection.receive():
            return coordinator.join(connection, message, now=now) or False
    except (ConnectionClosedError, ValueError, KeyError, TypeError):
        return False
    return None
