"""Measures how fast each compression method encodes and decodes on one core.

    python benchmarks/codecs.py

Each method encodes and decodes a gradient of four million values in a matrix, with error feedback where that is the
default; the methods take turns. GB/s count uncompressed values of 4 bytes. The last columns give the compute time for a
gradient of a million values (encoding, decoding, residual), the time to send its payload at 1 Gbit/s, and the sum
relative to sending the dense gradient. The table is also written to `benchmarks/results/codecs.json`.
"""

import argparse
import json
import os
import statistics
import sys
import time
from importlib.metadata import version
from pathlib import Path

import tensorflow as tf

from tfdist.compression import Compressor, Policy

METHODS = ("bf16", "fp16", "fp8", "int8", "int4", "qsgd", "sign", "topk:0.01", "randomk:0.01", "powersgd:4")
_SHAPE = (2048, 2048)
_MILLION = (1000, 1000)
_ROUNDS = 9
_BYTES_PER_SECOND = 1e9 / 8
_RESULTS = Path(__file__).parent / "results" / "codecs.json"


class Timed:
    """Times the functions of a method for gradients of one shape."""

    def __init__(self, compressor: Compressor, shape: tuple[int, ...]) -> None:
        """Traces the functions and runs each once."""
        self.gradient = tf.random.stateless_normal(shape, [1, 2])
        self.state = compressor.initial_state(shape)
        self._encode = tf.function(compressor.encode, autograph=False)
        self._decode = tf.function(lambda payload: compressor.decode(payload, shape), autograph=False)
        self._payload, _ = self._encode(self.gradient, self.state)
        self._decode(self._payload)
        tf.test.experimental.sync_devices()
        self.seconds: dict[str, list[float]] = {"encode": [], "decode": []}

    def measure(self) -> None:
        """Runs and times each function once."""
        for name, function, arguments in (
            ("encode", self._encode, (self.gradient, self.state)),
            ("decode", self._decode, (self._payload,)),
        ):
            start = time.perf_counter()
            function(*arguments)
            tf.test.experimental.sync_devices()  # kernels of a GPU end later
            self.seconds[name].append(time.perf_counter() - start)

    def median(self, name: str) -> float:
        """The median of the seconds of "encode" or "decode"."""
        return statistics.median(self.seconds[name])


def main() -> int:
    """Measures all methods, prints the table and writes it."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    compressors = {name: Policy(name).compressor_for("kernel") for name in METHODS}
    large = {name: Timed(compressor, _SHAPE) for name, compressor in compressors.items()}
    small = {name: Timed(compressor, _MILLION) for name, compressor in compressors.items()}
    for _ in range(_ROUNDS):
        for timed in (*large.values(), *small.values()):
            timed.measure()
    rows = [_row(name, compressors[name], large[name], small[name]) for name in METHODS]
    dense_ms = 1e3 * 4e6 / _BYTES_PER_SECOND
    print(f"Dense, a million values at 1 Gbit/s: {dense_ms:.1f} ms\n")
    print("| method | encode GB/s | decode GB/s | a million values: compute ms | send ms at 1 Gbit/s | of dense |")
    print("|---|---:|---:|---:|---:|---:|")
    for row in rows:
        print(
            f"| {row['method']} | {row['encode_gb_s']:.2f} | {row['decode_gb_s']:.2f} | {row['million_ms']:.2f} "
            f"| {row['million_send_ms']:.2f} | {(row['million_ms'] + row['million_send_ms']) / dense_ms:.2f} |"
        )
    versions = {name: version(name) for name in ("tensorflow", "keras")}
    _RESULTS.parent.mkdir(exist_ok=True)
    _RESULTS.write_text(json.dumps({"versions": versions, "dense_ms": dense_ms, "rows": rows}, indent=1) + "\n")
    return 0


def _row(name: str, compressor: Compressor, large: Timed, small: Timed) -> dict[str, float | str]:
    gigabytes = 4 * large.gradient.shape.num_elements() / 1e9
    return {
        "method": name,
        "encode_gb_s": gigabytes / large.median("encode"),
        "decode_gb_s": gigabytes / large.median("decode"),
        "million_ms": 1e3 * (small.median("encode") + small.median("decode")),
        "million_send_ms": 1e3 * compressor.payload_bytes(_MILLION) / _BYTES_PER_SECOND,
    }


if __name__ == "__main__":
    sys.exit(main())
