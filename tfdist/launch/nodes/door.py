"""Where joiners come in: nobody passes who has not proved the token, and whoever has not gets little of anything."""

import collections
import contextlib
import errno
import socket
from collections.abc import Callable

from tfdist.launch.nodes.frames import MAX_GREETING_BYTES, FrameBuffer, FrameError, framed
from tfdist.launch.nodes.handshake import Greeting, Secrets, encode_proof, encode_refusal, is_proof
from tfdist.launch.nodes.link import Link, plain_address, tune

HANDSHAKE_SECONDS = 10.0
MAX_VISITORS = 64
MAX_VISITORS_OF_AN_ADDRESS = 16
_MAX_TOLD = 100
WRONG_TOKEN = "wrong token"


class Door:
    """Accepts connections and lets those in that prove the token in time.

    Args:
        server: A listening socket; closed with the door.
        token: What joiners have to know.
        say: Tells the user of those that are turned away: once for an address and a reason.
    """

    def __init__(self, server: socket.socket, token: str, say: Callable[[str], None]) -> None:
        server.setblocking(False)
        self._server, self._token, self._say = server, token, say
        self._visitors: dict[int, _Visitor] = {}
        self._told: set[tuple[str, str]] = set()

    @property
    def descriptors(self) -> list[int]:
        """What to wait on until it is readable."""
        return [self._server.fileno(), *self._visitors]

    def look(self, *, now: float) -> list[Link]:
        """Accepts, reads what has arrived, sends away, and returns the links to those that have proved the token."""
        self._accept(now)
        links = []
        for fd, visitor in list(self._visitors.items()):
            try:
                link = visitor.advance()
                if link is None and now < visitor.until:
                    continue
                if link is None:
                    raise FrameError("no proof of the token in time")
                links.append(link)
            except (FrameError, OSError) as error:
                self._turn_away(visitor, str(error))
            del self._visitors[fd]
        return links

    def close(self) -> None:
        """Closes it, and sends away who stands in it."""
        for visitor in self._visitors.values():
            visitor.connection.close()
        self._visitors.clear()
        self._server.close()

    def _accept(self, now: float) -> None:
        for _ in range(MAX_VISITORS):
            try:
                connection, address = self._server.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                    self._tell("all", f"no room for another connection ({error.strerror})")
                return
            host = plain_address(address[0])
            counts = collections.Counter(visitor.host for visitor in self._visitors.values())
            if counts.total() >= MAX_VISITORS or counts[host] >= MAX_VISITORS_OF_AN_ADDRESS:
                connection.close()
                self._tell(host, "too many connections that have not proved the token")
                continue
            tune(connection)
            connection.setblocking(False)
            self._visitors[connection.fileno()] = _Visitor(connection, host, self._token, now + HANDSHAKE_SECONDS)

    def _turn_away(self, visitor: "_Visitor", reason: str) -> None:
        with contextlib.suppress(OSError):
            visitor.connection.shutdown(socket.SHUT_WR)
        visitor.connection.close()
        self._tell(visitor.host, reason)

    def _tell(self, host: str, reason: str) -> None:
        if (host, reason) not in self._told and len(self._told) < _MAX_TOLD:
            self._told.add((host, reason))
            self._say(f"rendezvous: turned {host} away: {reason}")


class _Visitor:
    """A connection that has not proved the token yet."""

    def __init__(self, connection: socket.socket, host: str, token: str, until: float) -> None:
        self.connection, self.host, self.until = connection, host, until
        self._token = token
        self._buffer = FrameBuffer(max_bytes=MAX_GREETING_BYTES)
        self._own = Greeting.new()
        self._secrets: Secrets | None = None

    def advance(self) -> Link | None:
        """Reads what has arrived; returns the link when the token is proved.

        Raises:
            FrameError: If it is to be sent away.
            OSError: If it has gone.
        """
        try:
            data = self.connection.recv(2 * MAX_GREETING_BYTES)
        except BlockingIOError:
            return None
        self._buffer.feed(data)
        while (body := self._buffer.next()) is not None:
            if self._secrets is None:
                self._greet(Greeting.decode(body))
            elif is_proof(body, self._secrets.joiner_proof):
                return self._let_in(self._secrets)
            else:
                self._send(encode_refusal(WRONG_TOKEN))
                raise FrameError(WRONG_TOKEN)
        if not data:
            raise FrameError("it has left before it proved the token")
        return None

    def _greet(self, theirs: Greeting) -> None:
        self._send(self._own.encode())
        reason = self._own.why_not(theirs)
        if reason:
            raise FrameError(reason)
        self._secrets = Secrets.derive(self._token, joiner=theirs, coordinator=self._own)

    def _let_in(self, secrets: Secrets) -> Link:
        self._send(encode_proof(secrets.coordinator_proof))
        if self._buffer.rest:  # the joiner waits for the answer first
            raise FrameError("more than the handshake")
        return Link(self.connection, send_key=secrets.coordinator_key, receive_key=secrets.joiner_key)

    def _send(self, body: bytes) -> None:
        # So little that a new connection takes it whole; one that does not is sent away.
        data = framed(body)
        if self.connection.send(data) != len(data):
            raise FrameError("it does not read what it is sent")
