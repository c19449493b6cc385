"""The chief of `test_cluster_bytes.py`: trains, and reads the bytes of the loopback in its network namespace."""

import json
import os
import sys
from pathlib import Path

import keras
import numpy as np

from tfdist.strategies import Asynchronous, ParameterServerStrategy, Synchronous

WIDTH, STEPS = 700, 24  # variables of 2 MB
VARIANTS = {"dense": {}, "int8": {"compression": "int8"}, "pull": {"pull_dtype": "bfloat16"}}


def carried() -> int:
    """Returns the bytes of all connections; each byte is received once."""
    return int(
        next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:")).split()[
            1
        ]
    )


def trained(strategy: ParameterServerStrategy, width: int) -> dict[str, int]:
    with strategy.scope():
        model = keras.Sequential([keras.Input((width,)), keras.layers.Dense(width, use_bias=False)])
        model.compile(keras.optimizers.SGD(1e-3), loss="mse")
    batch = np.random.default_rng(0).normal(size=(4, width)).astype("float32")
    model.fit(batch, batch, batch_size=2, epochs=2, verbose=0)  # traces, and opens the connections
    before, counts = carried(), strategy.worker_stats
    model.fit(np.tile(batch, (STEPS // 2, 1)), np.tile(batch, (STEPS // 2, 1)), batch_size=2, verbose=0)
    after = carried()
    sums = [
        sum(getattr(count, name) for count in strategy.worker_stats) - sum(getattr(count, name) for count in counts)
        for name in ("steps", "bytes_pushed", "bytes_pulled")
    ]
    return {"carried": after - before, "steps": sums[0], "pushed": sums[1], "pulled": sums[2]}


def main(folder: Path) -> None:
    found = {"namespace": os.readlink("/proc/self/ns/net")}
    for mode in (Asynchronous(), Synchronous()):
        for name, arguments in VARIANTS.items():
            for width in (8, WIDTH):  # the small one measures everything else
                strategy = ParameterServerStrategy(mode=mode, **arguments)
                found[f"{type(mode).__name__} {name} {width}"] = trained(strategy, width)
    (folder / "results.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
