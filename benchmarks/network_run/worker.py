"""What a worker of either framework does: it reads orders from its input and answers each with one line of JSON."""

import json
import os
import socket
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from network_run.links import INTERFACE

# Namespaces of their own: no port is taken.
TENSORFLOW_PORT = 7077
TORCH_PORT = 7078
_TRANSFER_PORT = 7079
_CHUNK = bytes(1 << 18)
BATCHES = 8


@dataclass(frozen=True)
class Place:
    """Where a worker stands.

    Attributes:
      rank: its number.
      addresses: of all workers.
      workload: the key of the model in `workloads.WORKLOADS`.
      folder: where worker `rank` of TensorFlow leaves its batches for that of PyTorch.
    """

    rank: int
    addresses: tuple[str, ...]
    workload: str
    folder: str

    @property
    def workers(self) -> int:
        """How many there are."""
        return len(self.addresses)

    @property
    def batches_file(self) -> Path:
        """The worker's batches: arrays `inputs` and `labels`, stacked."""
        return Path(self.folder) / f"{self.workload}-{self.rank}.npz"


class Worker(ABC):
    """Answers orders; the subclasses train."""

    def __init__(self, place: Place) -> None:
        self.place = place

    @abstractmethod
    def make(self, names: list[str]) -> dict[str, Any]:
        """Makes all variants. Returns the sizes of the model's variables and the versions of the libraries."""

    @abstractmethod
    def run(self, variant: str, steps: int) -> dict[str, Any]:
        """Takes steps one after another. Returns `seconds` of each, and `stated`: what the library says it sent."""

    @abstractmethod
    def fingerprint(self, variant: str) -> dict[str, float]:
        """Returns `value`: one number of all weights, equal on all workers that train one model."""

    def count(self) -> dict[str, int]:
        """Returns `bytes` and `packets` that this worker's interface has sent so far."""
        statistics = Path("/sys/class/net") / INTERFACE / "statistics"
        return {kind: int((statistics / f"tx_{kind}").read_text()) for kind in ("bytes", "packets")}

    def transfer(self, sender: int, receiver: int, size: int) -> dict[str, float]:
        """Sends `size` bytes from one worker to another; the receiver returns `bits_per_second`."""
        if self.place.rank == sender:
            _send(self.place.addresses[receiver], size)
        if self.place.rank != receiver:
            return {}
        with socket.create_server(("", _TRANSFER_PORT)) as server:
            connection, _ = server.accept()
            with connection:
                received = first = len(connection.recv(len(_CHUNK)))
                start = time.perf_counter()
                while data := connection.recv(len(_CHUNK)):
                    received += len(data)
                return {"bits_per_second": (received - first) * 8 / (time.perf_counter() - start)}


def _send(address: str, size: int) -> None:
    with _connected(address) as connection:
        for start in range(0, size, len(_CHUNK)):
            connection.sendall(_CHUNK[: size - start])


def _connected(address: str) -> socket.socket:
    end = time.monotonic() + 10
    while True:
        try:
            return socket.create_connection((address, _TRANSFER_PORT), timeout=60)
        except ConnectionRefusedError:
            if time.monotonic() > end:
                raise
            time.sleep(0.01)


def serve(make: Callable[[Place], Worker]) -> None:
    """Answers orders until the input ends. What the libraries print goes to the log.

    Args:
      make: makes the worker, once this process has its core.
    """
    place = Place(**json.loads(sys.argv[1]))
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[place.rank % len(os.sched_getaffinity(0))]})
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        worker = make(place)
        for line in sys.stdin:
            order = json.loads(line)
            answer = getattr(worker, order.pop("do"))(**order)
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
        # Nothing is to be saved; the libraries' threads would wait for peers that leave at another time.
        os._exit(0)
