"""What a task does for its peers while it is examined: it answers on its port."""

import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from tfdist.doctor.channel import Channel, ChannelError
from tfdist.doctor.greeting import About, Passport

MAX_TRANSFER_BYTES = 2**28
TRANSFER_SECONDS = 15.0
_GREET_SECONDS = 5.0
_IDLE_SECONDS = 600.0
_STRANGERS = 32
_END_SECONDS = 2.0
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)

Handler = Callable[[dict[str, Any]], dict[str, Any]]


class Service:
    """Answers the peers, each connection in a thread of its own.

    Everyone who proves to be of the cluster may have it tell the time, and send and take bytes. The first task, which
    conducts the examination, may ask for more.

    Args:
        server: The listening socket of this task; closed with the service.
        passport: What this task proves and says of itself.
        conductor: The task that may ask for more.
        clock: Tells the time of this machine, in seconds since 1970.
        duties: What the conductor may ask for, by name.
        max_peers: How many connections of peers there may be.
    """

    def __init__(
        self,
        server: socket.socket,
        passport: Passport,
        *,
        conductor: str,
        clock: Callable[[], float],
        duties: Mapping[str, Handler],
        max_peers: int,
    ) -> None:
        self._server, self._passport, self._conductor = server, passport, conductor
        self._clock, self._duties, self._max = clock, duties, 2 * max_peers + _STRANGERS
        self._lock = threading.Lock()
        self._channels: dict[Channel, threading.Thread] = {}
        self.visitors: set[str] = set()
        """The tasks that have reached this one."""
        self._conductors = 0
        threading.Thread(target=self._accept, name="tfdist doctor", daemon=True).start()

    @property
    def conductor_left(self) -> bool:
        """Whether the conductor had come, and has no connection any more."""
        with self._lock:
            return self._conductor in self.visitors and not self._conductors

    def close(self) -> None:
        """Ends it: the port is free, and all connections are closed."""
        try:
            self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept
        except OSError:
            pass
        self._server.close()
        with self._lock:
            serving = dict(self._channels)
        for channel in serving:
            channel.close()
        end = time.monotonic() + _END_SECONDS
        for thread in serving.values():
            thread.join(max(0.0, end - time.monotonic()))

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return  # closed
            with self._lock:
                is_full = len(self._channels) >= self._max
            if is_full:
                connection.close()
                continue
            try:
                # No TIME_WAIT, which would keep the port from the training that follows.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
                channel = Channel(connection)
            except OSError:  # gone already
                connection.close()
                continue
            thread = threading.Thread(target=self._serve, args=(channel,), name="tfdist doctor peer", daemon=True)
            with self._lock:
                self._channels[channel] = thread
                thread.start()

    def _serve(self, channel: Channel) -> None:
        about = None
        try:
            about = self._passport.recognise(channel, _GREET_SECONDS)
            self._welcome(about)
            while True:
                self._answer(channel, about, channel.receive(_IDLE_SECONDS))
        except ChannelError:
            pass  # it has gone, or is a stranger
        finally:
            channel.close()
            with self._lock:
                self._channels.pop(channel, None)
                self._conductors -= about is not None and about.task == self._conductor

    def _welcome(self, about: About) -> None:
        with self._lock:
            self.visitors.add(about.task)
            self._conductors += about.task == self._conductor

    def _answer(self, channel: Channel, about: About, request: dict[str, Any]) -> None:
        what = str(request.get("do"))
        if what == "echo":
            channel.send({"clock": self._clock()})
        elif what in ("send", "take"):
            count = request.get("bytes")
            if not isinstance(count, int) or not 0 < count <= MAX_TRANSFER_BYTES:
                raise ChannelError("a transfer of a wrong size")
            if what == "send":
                channel.send_bytes(count, TRANSFER_SECONDS)
            else:
                channel.send({"bytes_per_second": channel.receive_bytes(count, TRANSFER_SECONDS)})
        elif what in self._duties and about.task == self._conductor:
            channel.send(self._duties[what](request))
        else:
            channel.send({"error": f"not for {about.task} to ask: {what[:40]}"})
