"""The state of a training, and the results of its later steps, from a worker that trains to one that joins."""

import contextlib
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import xxhash

from tfdist.exchange.channel import Array, new_result
from tfdist.exchange.group_listener import Encryption, GroupListener, Request, ask
from tfdist.exchange.result_log import LoggedResult
from tfdist.transport.blocking_connection import BlockingConnection
from tfdist.transport.handshake import Credentials
from tfdist.transport.transport_errors import ConnectionClosedError, TransportError
from tfdist.utils.cores_and_ports import host_and_port
from tfdist.utils.dtypes import dtype_named

_GROUP = "state"
_SILENCE_SECONDS = 60.0
_LONGEST_WAIT_SECONDS = 86400.0  # a worker that ends is noticed by the kernel
_BLOCK_BYTES = 2**20
_MAX_QUEUED_STATES = 4  # results for which a joining worker is this many times its state behind are not kept
_LEAST_QUEUED_BYTES = 2**28


class StateRequest:
    """A worker that waits for the state."""

    def __init__(self, connection: BlockingConnection, fit: int) -> None:
        self.connection, self.fit = connection, fit

    def refuse(self, fit: int) -> None:
        """Tells the worker that the others are in a later `fit`, of a number."""
        self._answer({"fit": fit})

    def fail(self, reason: str) -> None:
        """Tells the worker why it cannot have the state."""
        self._answer({"reason": reason})

    def _answer(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(TransportError):
            self.connection.send(message)
        self.connection.close()


class StateDonor:
    """Sends this worker's state to those that ask for it, and then what its steps exchange.

    Args:
        listener: By which the others ask.
    """

    def __init__(self, listener: GroupListener) -> None:
        self._listener = listener
        self._requests: queue.SimpleQueue[StateRequest] = queue.SimpleQueue()
        self._transfers: list[_Transfer] = []
        listener.add(_GROUP, self._take)

    @property
    def is_asked(self) -> bool:
        """Whether a worker waits for the state."""
        return not self._requests.empty()

    @property
    def is_sending(self) -> bool:
        """Whether a worker wants the results of steps."""
        self._transfers = [transfer for transfer in self._transfers if not transfer.has_ended]
        return bool(self._transfers)

    def requests(self) -> list[StateRequest]:
        """Returns the workers that have asked since the last call."""
        found = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._requests.get_nowait())
        return found

    def keep(self, request: StateRequest) -> None:
        """Leaves a request for a later call of `requests`."""
        self._requests.put(request)

    def send(self, request: StateRequest, step: int, parts: Sequence[Any]) -> None:
        """Sends the state after a step, on another thread.

        Args:
            request: The worker.
            step: The number of committed steps.
            parts: The buffers to send. They are released when they are sent.
        """
        transfer = _Transfer(request.connection)
        self._transfers.append(transfer)
        transfer.put({"step": step}, parts)

    def send_step(self, step: int, results: Sequence[LoggedResult]) -> None:
        """Sends the results of the exchanges of a step to all workers that have got the state before."""
        described = [
            [result.channel, result.kind, result.values.dtype.name, list(result.values.shape)] for result in results
        ]
        for transfer in self._transfers:
            transfer.put({"step": step, "results": described}, [result.values for result in results])

    def close(self) -> None:
        """Ends all transfers."""
        self._listener.remove(_GROUP)
        for request in self.requests():
            request.connection.close()
        for transfer in self._transfers:
            transfer.close()

    def close_in_fork(self) -> None:
        """Closes the connections in a forked child; they stay open in the parent."""
        waiting = self.requests()
        for connection in [request.connection for request in waiting] + [one.connection for one in self._transfers]:
            _close_in_fork(connection)

    def _take(self, request: Request) -> None:
        fit = request.message.get("fit")
        request.connection.send({"waits": True})
        self._requests.put(StateRequest(request.connection, fit if isinstance(fit, int) else 0))


class _Transfer:
    """Messages to one worker, each with buffers behind it.

    It sends the state at most half of the time, as others need the link. The results of steps are sent at once: until
    that worker has all of them, there are more with each step.
    """

    def __init__(self, connection: BlockingConnection) -> None:
        self.connection = connection
        self._queue: queue.SimpleQueue[tuple[dict[str, Any], Sequence[Any]] | None] = queue.SimpleQueue()
        self._queued_bytes, self._limit_bytes = 0, 0
        self._counting = threading.Lock()
        self.has_ended = False
        threading.Thread(target=self._send_all, name="tfdist state", daemon=True).start()

    def put(self, message: dict[str, Any], parts: Sequence[Any]) -> None:
        """Sends a message and buffers after all earlier ones."""
        with self._counting:
            self._queued_bytes += _bytes_of_results(message, parts)
            is_too_much = 0 < self._limit_bytes < self._queued_bytes
        if is_too_much:
            self.close()
        elif not self.has_ended:
            self._queue.put((message, parts))

    def close(self) -> None:
        """Ends the thread, also while it sends, and forgets what is left to send."""
        self.has_ended = True
        with contextlib.suppress(queue.Empty):
            while True:
                self._queue.get_nowait()
        self._queue.put(None)
        with contextlib.suppress(OSError):
            self.connection.detach()[0].shutdown(socket.SHUT_RDWR)

    def _send_all(self) -> None:
        try:
            while not self.has_ended and self._send_next():
                pass
        except (TransportError, OSError):
            pass  # that worker has ended
        finally:
            self.has_ended = True
            self.connection.close()

    def _send_next(self) -> bool:
        """Sends what was put first, and keeps nothing of it; returns false at the end."""
        if (entry := self._queue.get()) is None:
            return False
        message, parts = entry
        self._send(message, [memoryview(part) for part in _flat(parts)])
        with self._counting:
            self._queued_bytes -= _bytes_of_results(message, parts)
        return True

    def _send(self, message: dict[str, Any], buffers: Sequence[memoryview]) -> None:
        sizes = [len(buffer) for buffer in buffers]
        if is_state := "results" not in message:
            self._limit_bytes = max(_MAX_QUEUED_STATES * sum(sizes), _LEAST_QUEUED_BYTES)
        checksums = [xxhash.xxh3_128_hexdigest(buffer) for buffer in buffers]
        self.connection.send({**message, "sizes": sizes, "checksums": checksums})
        for buffer in buffers:
            for begin in range(0, len(buffer), _BLOCK_BYTES):
                began = time.monotonic()
                self.connection.send_data(buffer[begin : begin + _BLOCK_BYTES], _SILENCE_SECONDS)
                if is_state:
                    time.sleep(time.monotonic() - began)


def _close_in_fork(connection: BlockingConnection) -> None:
    if (descriptor := connection.detach()[0].detach()) >= 0:
        os.close(descriptor)


def _bytes_of_results(message: dict[str, Any], parts: Sequence[Any]) -> int:
    return sum(part.nbytes for part in parts) if "results" in message else 0


def _flat(parts: Sequence[Any]) -> list[Any]:
    return [np.ascontiguousarray(part).reshape(-1).view(np.uint8) for part in parts]


class StateReceiver:
    """What a worker that joins receives from one that trains, in a thread.

    Args:
        donor: The rank of that worker.
        address: Its `host:port`.
        credentials: What both sides prove.
        fit: The number of this worker's `fit`.
        on_arrival: Called when something has arrived.
        encryption: Encrypts the connection, if given.

    Raises:
        TransportError, OSError: That worker does not answer.

    Attributes:
        later_fit: The number of the others' `fit`, if they are in a later one.
        state: The step of the state, and its buffers, once it is complete.
        refusal: Why that worker cannot send its state; "" if it can.
        failure: Why nothing more comes; "" while it does.
    """

    def __init__(
        self,
        donor: int,
        address: str,
        credentials: Credentials,
        fit: int,
        on_arrival: Callable[[], None],
        *,
        encryption: Encryption | None = None,
    ) -> None:
        self.donor = donor
        self.later_fit: int | None = None
        self.state: tuple[int, list[Array]] | None = None
        self.refusal = self.failure = ""
        self._steps: queue.SimpleQueue[tuple[int, list[LoggedResult]]] = queue.SimpleQueue()
        self._on_arrival = on_arrival
        connection = socket.create_connection(host_and_port(address), _SILENCE_SECONDS)
        message = {"group": _GROUP, "fit": fit}
        self._connection, _ = ask(connection, credentials, message, encryption=encryption)
        threading.Thread(target=self._receive_all, name="tfdist state", daemon=True).start()

    @property
    def has_answered(self) -> bool:
        """Whether it is known what follows."""
        return self.state is not None or self.later_fit is not None or bool(self.failure)

    @property
    def has_step(self) -> bool:
        """Whether the results of the next step are there."""
        return not self._steps.empty()

    def next_step(self) -> tuple[int, list[LoggedResult]]:
        """Returns the number of the next step, and the results of its exchanges."""
        return self._steps.get_nowait()

    def close(self) -> None:
        """Ends the thread."""
        self._connection.close()

    def _receive_all(self) -> None:
        try:
            while self.later_fit is None:
                self._receive()
                self._on_arrival()
        except (TransportError, OSError, KeyError, TypeError, ValueError) as error:
            self.failure = str(error) or type(error).__name__
        self._on_arrival()

    def _receive(self) -> None:
        message = self._connection.receive(_LONGEST_WAIT_SECONDS)
        if "fit" in message:
            self.later_fit = int(message["fit"])
            return
        if "reason" in message:
            self.refusal = str(message["reason"])
            raise ConnectionClosedError(self.refusal)
        # TensorFlow takes the results of a step without a copy.
        buffers: list[Any] = [new_result([size], np.uint8) for size in message["sizes"]]
        for buffer in buffers:
            self._connection.receive_data(memoryview(buffer), _SILENCE_SECONDS)
        if [xxhash.xxh3_128_hexdigest(buffer) for buffer in buffers] != message["checksums"]:
            raise ConnectionClosedError("the state has another checksum than when it was sent")
        if "results" not in message:
            self.state = int(message["step"]), buffers
            return
        results = [
            LoggedResult(channel, kind, buffer.view(dtype_named(dtype)).reshape(shape))
            for (channel, kind, dtype, shape), buffer in zip(message["results"], buffers, strict=True)
        ]
        self._steps.put((int(message["step"]), results))
