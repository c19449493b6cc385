"""Dials the other tasks until all have answered, or the time is over."""

import dataclasses
import socket
import threading
import time
from collections.abc import Mapping

from tfdist.doctor.channel import Channel, ChannelError
from tfdist.doctor.greeting import REFUSALS, About, Passport, RefusedError
from tfdist.doctor.situation import host_of, port_of

_CONNECT_SECONDS = 5.0
_GREET_SECONDS = 5.0
_PAUSE_SECONDS = 0.2
_REFUSED_SECONDS = 20.0  # long enough for the other side to be refused as well, and to tell its user
_REFUSED_CONNECTION = "connection refused: nothing listens on that port"


@dataclasses.dataclass
class Peer:
    """Another task, as this one sees it.

    Args:
        task: Which one, `"worker 1"`.
        address: Its `"host:port"`.
        channel: The connection to it, once it has answered.
        about: What it has said of itself, once it has answered.
        reason: Why it has not answered, by the last trial.
    """

    task: str
    address: str
    channel: Channel | None = None
    about: About | None = None
    reason: str = "not tried yet"


class Peers:
    """The other tasks: dialed side by side, each by a thread of its own, as resolving a name knows no limit.

    Args:
        addresses: Address by task, without this one.
        passport: What this task proves and says of itself.
    """

    def __init__(self, addresses: Mapping[str, str], passport: Passport) -> None:
        self.all = {task: Peer(task, address) for task, address in addresses.items()}
        self._passport = passport
        self._enough = threading.Event()
        self._dialers: tuple[threading.Thread, ...] | None = None

    def dial(self, timeout_seconds: float) -> None:
        """Begins to dial all of them, for `timeout_seconds`."""
        end = time.monotonic() + timeout_seconds
        dialers = tuple(
            threading.Thread(target=self._dial, args=(peer, end), name=f"dial {peer.task}", daemon=True)
            for peer in self.all.values()
        )
        for dialer in dialers:
            dialer.start()
        self._dialers = dialers  # not before: one that has not started is not alive either

    def stop_waiting(self) -> None:
        """Gives those that have not answered one trial more."""
        self._enough.set()

    @property
    def is_done(self) -> bool:
        """Whether all have been dialed, and have answered or been given up."""
        dialers = self._dialers
        return dialers is not None and not any(dialer.is_alive() for dialer in dialers)

    def wait(self, limit_seconds: float) -> bool:
        """Waits until all have answered or been given up, at most `limit_seconds`; returns whether they have."""
        end = time.monotonic() + limit_seconds
        for dialer in self._dialers or ():
            dialer.join(max(0.0, end - time.monotonic()))
        return self.is_done

    @property
    def missing(self) -> dict[str, str]:
        """Why each of those that have not answered has not, by task."""
        return {task: peer.reason for task, peer in self.all.items() if peer.channel is None}

    @property
    def answered(self) -> dict[str, Peer]:
        """Those that have answered, by task."""
        return {task: peer for task, peer in self.all.items() if peer.channel is not None}

    def close(self) -> None:
        """Ends the dialing, and closes all connections."""
        self._enough.set()
        for peer in self.all.values():
            if peer.channel is not None:
                peer.channel.close()

    def _dial(self, peer: Peer, end: float) -> None:
        began = time.monotonic()
        while True:
            is_last = self._enough.is_set() or time.monotonic() >= end
            reason = self._try(peer)
            # Who was refused too tells its user and ends: that it is gone then says less than why.
            peer.reason = peer.reason if reason and reason not in REFUSALS and peer.reason in REFUSALS else reason
            is_refused = peer.reason in REFUSALS and time.monotonic() >= began + _REFUSED_SECONDS
            if not peer.reason or is_refused or is_last:
                return
            self._enough.wait(_PAUSE_SECONDS)

    def _try(self, peer: Peer) -> str:
        """Dials once and returns why that failed, or an empty string."""
        peer.reason = "its name is still being resolved" if peer.reason == "not tried yet" else peer.reason
        try:
            connection = socket.create_connection(
                (host_of(peer.address), port_of(peer.address)), timeout=_CONNECT_SECONDS
            )
        except ConnectionRefusedError:
            return _REFUSED_CONNECTION
        except TimeoutError:
            return f"no answer in {_CONNECT_SECONDS:g} s: the host is down, or a firewall drops what it is sent"
        except socket.gaierror as error:
            return f"the name {host_of(peer.address)} does not resolve ({error.strerror})"
        except (OSError, UnicodeError) as error:
            return str(getattr(error, "strerror", None) or error)
        channel = Channel(connection)
        try:
            about = self._passport.introduce(channel, _GREET_SECONDS)
            if about.task != peer.task:
                raise RefusedError(f"{about.task} answers there instead: an address or an index is wrong")
        except RefusedError as error:
            channel.close()
            return str(error)
        except ChannelError as error:
            channel.close()
            return f"whoever listens there does not answer as tfdist doctor ({error}): another program, or a hung one"
        peer.about, peer.channel = about, channel
        return ""
