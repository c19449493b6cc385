"""Times encoding, decoding and copies of 40 MB on a GPU and on the CPU: the program of the kit's case of codecs."""

import argparse
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.compression import Policy

_BENCHMARK = Path(__file__).resolve().parents[1] / "codecs.py"  # a name that Python's library has, too
_COLUMNS = 2048
_ALIGNMENT = 64


def main() -> int:
    """Measures all methods on each device, and the copies, and writes GB/s of uncompressed values."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--devices", required=True, help="separated by commas, as in tf.device")
    parser.add_argument("--values", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    codecs = _benchmark()
    shape = (max(options.values // _COLUMNS, 1), _COLUMNS)
    gigabytes = 4 * shape[0] * shape[1] / 1e9
    found: dict[str, dict[str, Any]] = {"gigabytes": {"dense": gigabytes}}
    for device in options.devices.split(","):
        found[device] = {}
        for name in codecs.METHODS:
            with tf.device(device):
                timed = codecs.Timed(Policy(name).compressor_for("kernel"), shape)
                for _ in range(options.rounds):
                    timed.measure()
            found[device][name] = {
                "encode_gb_s": gigabytes / timed.median("encode"),
                "decode_gb_s": gigabytes / timed.median("decode"),
            }
    device = options.devices.split(",")[0]
    copies = _copies(device, shape, options.rounds)
    found["copies"] = {name: gigabytes / seconds for name, seconds in copies.items()}
    options.output.write_text(json.dumps(found))
    return 0


def _benchmark() -> Any:
    spec = importlib.util.spec_from_file_location("codecs_benchmark", _BENCHMARK)
    if spec is None or spec.loader is None:
        raise SystemExit(f"Error: {_BENCHMARK} cannot be imported.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _copies(device: str, shape: tuple[int, int], rounds: int) -> dict[str, float]:
    """Returns the seconds of copies, on the paths of the exchange: through queues on the host to NumPy and back."""
    with tf.device("CPU:0"):
        leaving, returning = (tf.queue.FIFOQueue(1, [tf.float32]) for _ in range(2))
    with tf.device(device):
        tensor = tf.random.stateless_normal(shape, [1, 2])

    @tf.function(autograph=False)
    def leave(values: tf.Tensor) -> None:
        with tf.device("CPU:0"):
            leaving.enqueue(values)

    @tf.function(autograph=False)
    def take() -> tf.Tensor:
        with tf.device("CPU:0"):
            received = returning.dequeue()
        received.set_shape(shape)
        with tf.device(device):
            return received + 0.0

    def to_host() -> None:
        leave(tensor)
        with tf.device("CPU:0"):
            np.asarray(memoryview(leaving.dequeue()))

    host = _aligned(shape)

    def to_device() -> None:
        with tf.device("CPU:0"):
            returning.enqueue(tf.experimental.dlpack.from_dlpack(host.__dlpack__()))
        take()

    return {"to_host_gb_s": _median(to_host, rounds), "to_device_gb_s": _median(to_device, rounds)}


def _aligned(shape: tuple[int, int]) -> np.ndarray:
    """Returns an array that TensorFlow takes without a copy, as results of the exchange are."""
    count = 4 * shape[0] * shape[1]
    memory = np.ones(count + _ALIGNMENT, np.uint8)
    offset = -memory.ctypes.data % _ALIGNMENT
    return memory[offset : offset + count].view(np.float32).reshape(shape)


def _median(function: Callable[[], None], rounds: int) -> float:
    seconds = []
    for turn in range(rounds + 2):
        tf.test.experimental.sync_devices()
        began = time.perf_counter()
        function()
        tf.test.experimental.sync_devices()
        if turn > 1:
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


if __name__ == "__main__":
    sys.exit(main())
