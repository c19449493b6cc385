"""Cases of bytes: those that the strategy counts, and those that the loopback of the network namespace carries."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import keras
import numpy as np
from cluster_cases import Outcome, case

from tfdist.compression import Policy
from tfdist.strategies import Asynchronous, ParameterServerStrategy, Synchronous

WIDTH, STEPS = 700, 24
SHAPES = [(WIDTH, WIDTH), (WIDTH,)]
COMPRESSION = {"Asynchronous": "int8", "Synchronous": "int4"}


def policy(mode: str) -> Policy:
    """The compression of a mode's variant "compressed"."""
    return Policy(COMPRESSION[mode], dense_below=0)


def _carried() -> int:
    """Returns the bytes of all connections; each byte is received once."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return int(next(line for line in lines if line.strip().startswith("lo:")).split()[1])


def _trained(strategy: ParameterServerStrategy) -> Outcome:
    with strategy.scope():
        model = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(WIDTH)])
        model.compile(keras.optimizers.SGD(1e-3), loss="mse")
    batch = np.random.default_rng(0).normal(size=(4, WIDTH)).astype("float32")
    model.fit(batch, batch, batch_size=2, verbose=0)  # traces, and opens the connections
    before, counts = _carried(), strategy.worker_stats
    model.fit(np.tile(batch, (STEPS // 2, 1)), np.tile(batch, (STEPS // 2, 1)), batch_size=2, verbose=0)
    carried = _carried() - before
    since = [count.since(earlier) for count, earlier in zip(strategy.worker_stats, counts, strict=True)]
    steps, pushed, pulled = (
        sum(getattr(count, name) for count in since) for name in ("steps", "bytes_pushed", "bytes_pulled")
    )
    all_steps = sum(count.steps for count in strategy.worker_stats)
    return {
        "carried": carried,
        "steps": steps,
        "pushed": pushed,
        "pulled": pulled,
        "communication": {**asdict(strategy.communication), "steps": all_steps},
    }


@case
def transferred_bytes(_: Path) -> Outcome:
    """By mode and variant, the bytes of a training whose variables take 2 MB."""
    found: dict[str, Any] = {"namespace": os.readlink("/proc/self/ns/net")}
    for mode in (Asynchronous(), Synchronous()):
        name = type(mode).__name__
        variants: dict[str, dict[str, Any]] = {
            "dense": {},
            "compressed": {"compression": policy(name)},
            "pull": {"pull_dtype": "bfloat16"},
        }
        found[name] = {
            variant: _trained(ParameterServerStrategy(mode=mode, **arguments))
            for variant, arguments in variants.items()
        }
    return found
