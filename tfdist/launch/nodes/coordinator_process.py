"""The coordinator's process: a fork of node 0's supervisor, which goes on while that is held up, and ends with it."""

import contextlib
import os
import select
import signal
import socket
import time
import traceback
import warnings

from tfdist.launch.errors import UsageError
from tfdist.launch.linux import die_with_parent
from tfdist.launch.nodes.coordinator import Coordinator
from tfdist.launch.nodes.door import HANDSHAKE_SECONDS, Door
from tfdist.launch.nodes.link import Link, LinkClosed
from tfdist.launch.nodes.looks import Looks
from tfdist.launch.nodes.roster import Member, is_loopback
from tfdist.launch.nodes.rules import Rules
from tfdist.launch.output import Console

_LOOK_SECONDS = 0.1
_FAREWELL_SECONDS = 5.0  # for all to read the end of the run
_BACKLOG = 128


class CoordinatorProcess:
    """The process, until it has told all hosts the end. Must be made while this process has one thread.

    Args:
        host: The host of `--rendezvous`. Where it is a loopback address, only this host can join; else the coordinator
            listens on all interfaces, as TensorFlow's servers do.
        port: The port to listen on.
        token: What joiners have to know.
        rules: What holds for all hosts.
        console: Where it tells of those that it turns away.

    Raises:
        UsageError: If the port cannot be listened on.
    """

    def __init__(self, host: str, port: int, token: str, rules: Rules, console: Console) -> None:
        server = _listen(host, port)
        launcher = os.getpid()
        with warnings.catch_warnings():
            # Python 3.12 and later warn of threads; only a caller other than the command line can have any.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                _become_a_child(launcher)
                _serve(server, token, rules, console)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        server.close()

    def close(self, *, has_to_tell: bool) -> None:
        """Ends the process.

        Args:
            has_to_tell: Whether it may first tell all hosts the end of the run, for which it has little time.
        """
        end = time.monotonic() + (2 * _FAREWELL_SECONDS if has_to_tell else 0.0)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(self.pid, os.WNOHANG)[0] == 0:
                if time.monotonic() > end:
                    os.kill(self.pid, signal.SIGKILL)
                    os.waitpid(self.pid, 0)
                    return
                time.sleep(_LOOK_SECONDS / 2)


def _become_a_child(launcher: int) -> None:
    die_with_parent(launcher)
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def _listen(host: str, port: int) -> socket.socket:
    try:
        if is_loopback(host):
            return socket.create_server((host, port), backlog=_BACKLOG, family=_family(host))
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        return socket.create_server(("", port), backlog=_BACKLOG, family=family, dualstack_ipv6=both)
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise UsageError(
            f"The rendezvous cannot listen. Received: port {port} ({reason}). Expected: a free port of this "
            "host. Choose another one in --rendezvous on every host, or end the process that has it."
        ) from error


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _serve(server: socket.socket, token: str, rules: Rules, console: Console) -> None:
    door = Door(server, token, console.say_unless_stuck)
    began = time.monotonic()
    looks = Looks(now=began)
    coordinator = Coordinator(rules, now=0.0)
    strangers: dict[Link, float] = {}  # that have not said who they are, and until when they are waited for
    members: dict[Link, Member] = {}
    farewell_at: float | None = None
    while farewell_at is None or (members and looks.at(time.monotonic()) < farewell_at):
        _wait([*door.descriptors, *strangers, *members], [link for link in (*strangers, *members) if link.has_unsent])
        now = looks.at(time.monotonic())
        strangers |= {link: now + HANDSHAKE_SECONDS for link in door.look(now=now)}
        for link, member in list(members.items()):
            _exchange(coordinator, link, member, now)
        for link, until in list(strangers.items()):
            member_or_end = _introduce(coordinator, link, now)
            if member_or_end is None and now < until:
                continue
            del strangers[link]
            if isinstance(member_or_end, Member):
                members[link] = member_or_end
            else:
                link.close()
        coordinator.look(now=now)
        members = {link: member for link, member in members.items() if link.fileno() >= 0}
        if coordinator.is_over and farewell_at is None:
            farewell_at = now + _FAREWELL_SECONDS
    door.close()


def _wait(readable: list[int | Link], writable: list[Link]) -> None:
    poll = select.poll()
    for source in readable:
        poll.register(source, select.POLLIN)
    for link in writable:
        poll.register(link, select.POLLIN | select.POLLOUT)
    poll.poll(_LOOK_SECONDS * 1000)


def _exchange(coordinator: Coordinator, link: Link, member: Member, now: float) -> None:
    try:
        link.flush()
        for said in link.receive():
            coordinator.hear(member, said, now=now)
    except LinkClosed as closed:
        coordinator.lose(member, str(closed), now=now)
        link.close()
    except (ValueError, KeyError, TypeError) as error:
        coordinator.lose(member, f"it sent a message that makes no sense ({error!r})", now=now)
        link.close()


def _introduce(coordinator: Coordinator, link: Link, now: float) -> Member | bool | None:
    """Returns the member that a stranger has become; None: it has said nothing yet; False: it is not to be one."""
    try:
        for said in link.receive():
            return coordinator.join(link, said, now=now) or False
    except (LinkClosed, ValueError, KeyError, TypeError):
        return False
    return None
