"""One of two processes that time TensorFlow's collectives between them, as strategies call them."""

import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.collectives.all_reduce_algorithms import CollectiveGroup
from tfdist.collectives.byte_counters import GRADIENTS
from tfdist.planning.measurements import EXCHANGE, GATHER, SUM
from tfdist.probe.resident_memory import peak_bytes
from tfdist.strategies import MultiWorkerMirroredStrategy

_SIZES = {
    SUM: (1 << 10, 1 << 18, 1 << 21, 1 << 24),
    GATHER: (1 << 10, 1 << 18, 1 << 21, 1 << 23),
    EXCHANGE: (1 << 10, 1 << 18, 1 << 22),
}
# Short collectives are timed in turn in one function, whose own call a training step does not repeat for each of them.
_IN_TURN, _SHORT_BYTES = 8, 1 << 18
_FIRST_CALLS = 3
_BYTES_OF_CALLS = 1 << 27
_MIN_CALLS, _MAX_CALLS = 6, 60
_UNTIL_KILLED_SECONDS = 60.0


def main(argv: list[str]) -> None:
    """Times the collectives; the chief writes them and its memory, a JSON object, to the descriptor `argv[0]`."""
    strategy = MultiWorkerMirroredStrategy()
    launcher = strategy.extended.replica_operations.launchers[0]
    group = CollectiveGroup(launcher, label=GRADIENTS)
    found = [_timed(group, kind, nbytes) for kind, sizes in _SIZES.items() for nbytes in sizes]
    if strategy.rank == 0:
        with os.fdopen(int(argv[0]), "w") as file:
            json.dump({"transfers": found, "peak_bytes": peak_bytes()}, file)
    time.sleep(_UNTIL_KILLED_SECONDS)  # a process that exits makes the other's server report an error


def _timed(group: CollectiveGroup, kind: str, nbytes: int) -> dict[str, Any]:
    elements = nbytes // 4
    calls: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {
        SUM: group.sum,
        GATHER: group.gather,
        EXCHANGE: lambda tensor: tf.bitcast(
            group.exchange_rows(tf.reshape(tf.bitcast(tensor, tf.int32), [group.size, -1])), tf.float32
        ),
    }

    in_turn = _IN_TURN if nbytes <= _SHORT_BYTES else 1

    @tf.function(autograph=False)
    def run(tensor: tf.Tensor) -> tf.Tensor:
        for _ in range(in_turn):
            tensor = tf.ensure_shape(tf.reshape(calls[kind](tensor), [-1])[:elements], [elements])
        return tensor

    tensor = tf.ones([elements])
    for _ in range(_FIRST_CALLS):
        run(tensor)
    count = min(max(_BYTES_OF_CALLS // nbytes, _MIN_CALLS), _MAX_CALLS)
    seconds = []
    used = _core_seconds()
    for _ in range(count):
        start = time.perf_counter()
        run(tensor)
        seconds.append(time.perf_counter() - start)
    return {
        "kind": kind,
        "nbytes": nbytes,
        "seconds": statistics.quantiles(seconds, n=4)[0] / in_turn,  # other processes delay some calls
        "core_seconds": (_core_seconds() - used) / count / in_turn,
    }


def _core_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main(sys.argv[1:])
