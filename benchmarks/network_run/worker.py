"""A benchmark worker of any framework: reads method calls from its input and answers each with a line of JSON."""

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

# The network namespaces are new, so all ports are free.
TENSORFLOW_PORT = 7070
TORCH_PORT = 7078
_TRANSFER_PORT = 7079
JAX_PORT = 7080
EXCHANGE_PORT = 7090
_CHUNK = bytes(1 << 18)
BATCHES = 8


@dataclass(frozen=True)
class WorkerSpec:
    """Describes a worker.

    Attributes:
        rank: Its number.
        addresses: Of all workers.
        workload: Key of the model in `workloads.WORKLOADS`.
        folder: Where the TensorFlow worker stores its batches for the other frameworks' workers of the same rank.
    """

    rank: int
    addresses: tuple[str, ...]
    workload: str
    folder: str

    @property
    def workers(self) -> int:
        """The number of workers."""
        return len(self.addresses)

    @property
    def batches_file(self) -> Path:
        """The worker's batches: stacked arrays `inputs` and `labels`."""
        return Path(self.folder) / f"{self.workload}-{self.rank}.npz"


class Worker(ABC):
    """Runs the requested methods; subclasses train."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec

    @abstractmethod
    def make(self, names: list[str]) -> dict[str, Any]:
        """Creates all variants. Returns the sizes of the model's variables and the versions of the libraries."""

    @abstractmethod
    def run(self, variant: str, steps: int) -> dict[str, Any]:
        """Runs steps. Returns the `seconds` of each, and `stated`: the traffic that the library reports."""

    @abstractmethod
    def fingerprint(self, variant: str) -> dict[str, float]:
        """Returns `value`: a number computed from all weights, which is equal on workers with the same model."""

    def count(self) -> dict[str, int]:
        """Returns `bytes` and `packets` that this worker's interface has sent so far."""
        statistics = Path("/sys/class/net") / INTERFACE / "statistics"
        return {kind: int((statistics / f"tx_{kind}").read_text()) for kind in ("bytes", "packets")}

    def transfer(self, sender: int, receiver: int, size: int) -> dict[str, float]:
        """Sends `size` bytes from one worker to another; the receiver returns `bits_per_second`."""
        if self.spec.rank == sender:
            _send(self.spec.addresses[receiver], size)
        if self.spec.rank != receiver:
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


def serve(make: Callable[[WorkerSpec], Worker]) -> None:
    """Answers calls until the input ends. The output of the libraries goes to the log.

    Args:
        make: Creates the worker; called when this process is bound to its core.
    """
    spec = WorkerSpec(**json.loads(sys.argv[1]))
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[spec.rank % len(os.sched_getaffinity(0))]})
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        worker = make(spec)
        for line in sys.stdin:
            request = json.loads(line)
            answer = getattr(worker, request.pop("method"))(**request)
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
        # Exits at once: the libraries' threads would wait for peers that exit at another time.
        os._exit(0)
