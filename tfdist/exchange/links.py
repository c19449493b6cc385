"""Links: what carries the bytes between two workers. Non-blocking, so that one thread serves all peers at once."""

import abc
import contextlib
import mmap
import os
import select
import socket
import ssl

from tfdist.transport.nonblocking_connection import WOULD_BLOCK

SEGMENT_BYTES = 2**19
"""The largest segment that is sent at once. It fits into the cache of a core, where the receiver adds it."""

_SLOTS = 8
_CLOSED = "its process has ended"
Interest = tuple[int, int]
"""A descriptor and the events for which it is polled."""


class LinkBrokenError(ConnectionError):
    """The other worker is gone. The text is the cause."""


class WorkerLink(abc.ABC):
    """A stream of segments to and from the worker of rank `peer`."""

    def __init__(self, peer: int) -> None:
        self.peer = peer

    @abc.abstractmethod
    def send(self, segment: memoryview) -> bool:
        """Sends as much of `segment` as possible. Call it with the same segment until it returns true."""

    @abc.abstractmethod
    def receive(self, nbytes: int, into: memoryview | None = None) -> memoryview | None:
        """Returns the next `nbytes` once all have arrived; until then `None`.

        Args:
            nbytes: At most `SEGMENT_BYTES`, all within one segment of the sender.
            into: Where to put the bytes. By default memory of the link, which is valid until `release`.
        """

    @abc.abstractmethod
    def release(self) -> None:
        """Frees the memory of a segment, once all of it has been received and used."""

    @abc.abstractmethod
    def interests(self, *, sends: bool, receives: bool) -> list[Interest]:
        """Returns what to poll for until `send` or `receive` can progress."""

    @abc.abstractmethod
    def close(self) -> None:
        """Closes the link."""

    @abc.abstractmethod
    def close_in_fork(self) -> None:
        """Closes, in a forked child, the connection by whose end the other worker notices the end of this one."""


class SocketLink(WorkerLink):
    """A link over a TCP connection, possibly encrypted. `close` closes the socket."""

    def __init__(self, peer: int, connection: socket.socket) -> None:
        super().__init__(peer)
        connection.setblocking(False)
        self._socket = connection
        self._memory = memoryview(bytearray(SEGMENT_BYTES))
        self._sent = self._received = 0
        self._events_of_retry = 0  # TLS may have to read in order to write

    def send(self, segment: memoryview) -> bool:
        try:
            self._sent += self._socket.send(segment[self._sent :])
        except WOULD_BLOCK as error:
            self._note_retry(error)
        except OSError as error:
            raise _broken(error) from error
        if self._sent < len(segment):
            return False
        self._sent = 0
        return True

    def receive(self, nbytes: int, into: memoryview | None = None) -> memoryview | None:
        target = (self._memory if into is None else into)[:nbytes]
        try:
            while self._received < nbytes:
                count = self._socket.recv_into(target[self._received :])
                if not count:
                    raise LinkBrokenError(_CLOSED)
                self._received += count
        except WOULD_BLOCK as error:
            self._note_retry(error)
            return None
        except OSError as error:
            raise _broken(error) from error
        self._received = 0
        return target

    def release(self) -> None:
        pass  # the next `receive` uses the memory again

    def interests(self, *, sends: bool, receives: bool) -> list[Interest]:
        events = (select.POLLOUT if sends else 0) | (select.POLLIN if receives else 0) | self._events_of_retry
        self._events_of_retry = 0
        return [(self._socket.fileno(), events)] if events else []

    def close(self) -> None:
        self._socket.close()

    def close_in_fork(self) -> None:
        # A thread may have been within OpenSSL at the fork: leave that alone.
        if (descriptor := self._socket.detach()) >= 0:  # not closed before the fork
            os.close(descriptor)

    def _note_retry(self, error: OSError) -> None:
        if isinstance(error, ssl.SSLWantReadError):
            self._events_of_retry |= select.POLLIN
        elif isinstance(error, ssl.SSLWantWriteError):
            self._events_of_retry |= select.POLLOUT


class SharedMemoryLink(WorkerLink):
    """A link between two workers of one host: slots of memory for each direction.

    The memory has no name, so nothing is left when the workers are killed. Counters of the kernel (`eventfd`) say how
    many slots are full and how many are free; they also order the accesses to the memory. `memory` and `counters` are
    descriptors of `create`: first the slots and their counters of the side that created them.
    """

    MEMORY_BYTES = _SLOTS * SEGMENT_BYTES

    def __init__(self, peer: int, memory: int, counters: list[int], *, is_creator: bool) -> None:
        super().__init__(peer)
        self._descriptors = list(counters)
        self._memory = mmap.mmap(memory, 2 * self.MEMORY_BYTES)
        os.close(memory)  # the map has a duplicate
        with memoryview(self._memory) as whole_memory:
            starts = range(0, 2 * self.MEMORY_BYTES, SEGMENT_BYTES)
            slots = [whole_memory[start : start + SEGMENT_BYTES] for start in starts]
        first, second = (slots[:_SLOTS], counters[:2]), (slots[_SLOTS:], counters[2:])
        (self._outgoing, own_counters), (self._incoming, peer_counters) = (
            (first, second) if is_creator else (second, first)
        )
        self._sent_counter, self._free_counter = own_counters
        self._full_counter, self._released_counter = peer_counters
        self._free, self._full = _SLOTS, 0
        self._next_outgoing = self._next_incoming = 0
        self._offset = 0  # in the slot that is being received

    @staticmethod
    def create() -> list[int]:
        """Returns the descriptors of new memory and its four counters, for both sides."""
        memory = os.memfd_create("tfdist", os.MFD_CLOEXEC)
        os.ftruncate(memory, 2 * SharedMemoryLink.MEMORY_BYTES)
        return [memory, *(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(4))]

    def send(self, segment: memoryview) -> bool:
        if not self._free:
            self._free += _count(self._free_counter)
        if not self._free:
            return False
        self._outgoing[self._next_outgoing][: len(segment)] = segment
        self._next_outgoing = (self._next_outgoing + 1) % _SLOTS
        self._free -= 1
        os.eventfd_write(self._sent_counter, 1)
        return True

    def receive(self, nbytes: int, into: memoryview | None = None) -> memoryview | None:
        if not self._full:
            self._full += _count(self._full_counter)
        if not self._full:
            return None
        view = self._incoming[self._next_incoming][self._offset : self._offset + nbytes]
        self._offset += nbytes
        if into is None:
            return view
        into[:nbytes] = view
        return into[:nbytes]

    def release(self) -> None:
        self._offset = 0
        self._full -= 1
        self._next_incoming = (self._next_incoming + 1) % _SLOTS
        os.eventfd_write(self._released_counter, 1)

    def interests(self, *, sends: bool, receives: bool) -> list[Interest]:
        send_interests = [(self._free_counter, select.POLLIN)] if sends else []
        return [*send_interests, (self._full_counter, select.POLLIN)] if receives else send_interests

    def close_in_fork(self) -> None:
        pass  # the control connection ends with the worker

    def close(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        for view in (*self._outgoing, *self._incoming):
            view.release()
        self._descriptors, self._outgoing, self._incoming = [], [], []
        with contextlib.suppress(BufferError):  # an error's traceback may still hold a part of it
            self._memory.close()


def _count(counter: int) -> int:
    try:
        return os.eventfd_read(counter)
    except BlockingIOError:
        return 0


def _broken(error: OSError) -> LinkBrokenError:
    if isinstance(error, LinkBrokenError):
        return error
    is_reset = isinstance(error, (ConnectionResetError, BrokenPipeError))
    return LinkBrokenError(_CLOSED if is_reset else f"its connection broke ({error.strerror or error})")
