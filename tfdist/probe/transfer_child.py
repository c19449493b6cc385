"""One of two processes that time exchanges between them, from the graph of one to that of the other."""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.collectives.exchange_boundary import ExchangeBoundary
from tfdist.exchange.channel import Channel
from tfdist.exchange.result_log import LoggedChannel
from tfdist.exchange.worker_exchange import SMALL, Exchange
from tfdist.planning.measurements import EXCHANGE, GATHER, MESSAGE, SUM
from tfdist.probe.process_usage import peak_bytes

_SIZES = {
    SUM: (1 << 10, 1 << 18, 1 << 21, 1 << 24),
    GATHER: (1 << 10, 1 << 18, 1 << 21, 1 << 23),
    EXCHANGE: (1 << 10, 1 << 18, 1 << 22),
}
# Short exchanges are timed in turn in one function, whose own call a training step does not repeat for each of them.
_IN_TURN, _SHORT_BYTES = 8, 1 << 18
_FIRST_CALLS = 3
_MESSAGE_BYTES = 1 << 10
_BYTES_OF_CALLS = 1 << 27
_MIN_CALLS, _MAX_CALLS = 6, 60
_UNTIL_KILLED_SECONDS = 60.0


def main(argv: list[str]) -> None:
    """Times exchanges by sockets and by memory; the chief writes JSON, with its memory, to the descriptor `argv[0]`.

    Further arguments: the rank, and the address of each process.
    """
    results: dict[str, Any] = {}
    descriptor, rank, addresses = int(argv[0]), int(argv[1]), argv[2:]
    token = os.environ["TFDIST_TOKEN"]
    for name, shares_memory in (("transfers", False), ("local_transfers", True)):
        boundary = ExchangeBoundary(Exchange(rank, addresses, token=token, shares_memory=shares_memory))
        results[name] = [_timed(boundary, kind, nbytes) for kind, sizes in _SIZES.items() for nbytes in sizes]
        results[name].append(_timed_message(boundary.exchange.channel(SMALL)))
    if rank == 0:
        with os.fdopen(descriptor, "w") as file:
            json.dump(results | {"peak_bytes": peak_bytes()}, file)
    time.sleep(_UNTIL_KILLED_SECONDS)  # a process that exits is a failure for the other


def _timed(boundary: ExchangeBoundary, kind: str, nbytes: int) -> dict[str, Any]:
    elements = nbytes // 4
    calls: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {
        SUM: boundary.all_reduce,
        GATHER: boundary.all_gather,
        EXCHANGE: lambda tensor: boundary.all_to_all(tf.reshape(tensor, [boundary.size, -1])),
    }

    in_turn = _IN_TURN if nbytes <= _SHORT_BYTES else 1

    @tf.function(autograph=False)
    def run(tensor: tf.Tensor) -> tf.Tensor:
        for _ in range(in_turn):
            tensor = tf.ensure_shape(tf.reshape(calls[kind](tensor), [-1])[:elements], [elements])
        return tensor

    tensor = tf.ones([elements])
    return _timed_calls(kind, nbytes, lambda: run(tensor), in_turn)


def _timed_message(channel: Channel | LoggedChannel) -> dict[str, Any]:
    values = np.zeros(_MESSAGE_BYTES, np.uint8)
    return _timed_calls(
        MESSAGE, _MESSAGE_BYTES, lambda: [channel.all_gather(values) for _ in range(_IN_TURN)], _IN_TURN
    )


def _timed_calls(kind: str, nbytes: int, run: Callable[[], Any], in_turn: int) -> dict[str, Any]:
    for _ in range(_FIRST_CALLS):
        run()
    count = min(max(_BYTES_OF_CALLS // nbytes, _MIN_CALLS), _MAX_CALLS)
    seconds = []
    used = time.process_time()
    for _ in range(count):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return {
        "kind": kind,
        "nbytes": nbytes,
        "seconds": statistics.quantiles(seconds, n=4)[0] / in_turn,  # other processes delay some calls
        "core_seconds": (time.process_time() - used) / count / in_turn,
    }


if __name__ == "__main__":
    main(sys.argv[1:])
