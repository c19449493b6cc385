"""Measures what the processes of stages send to each other, and compares it with the counters and the formulas.

One client trains over four servers of TensorFlow on this host. The bytes of each link are those of the sockets between
two processes, as `ss` (iproute2) reports them: the payload of TCP, without its headers.

    python benchmarks/stage_links.py [--output benchmarks/results/stage_links.json] [--case NAME ...]
"""

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SERVERS, STEPS, MICRO_BATCHES = 4, 10, 4
WIDTH, ROWS, CLASSES, HIDDEN = 512, 512, 5, 7  # of the MLP
WORDS, LENGTH, MODEL_WIDTH, SEQUENCES = 500, 64, 64, 64  # of the transformer
_QUIET_SECONDS = 0.6
# Over which a second column receives weights that are assigned outside of a step.
_COPIES = {("worker:0", "worker:2"), ("worker:1", "worker:3")}

Links = dict[tuple[str, str], float]


def mlp() -> Any:
    """Seven hidden layers of equal width."""
    import keras

    hidden = [keras.layers.Dense(WIDTH, "relu", name=f"hidden_{index}") for index in range(HIDDEN)]
    return keras.Sequential([keras.Input((WIDTH,)), *hidden, keras.layers.Dense(CLASSES)])


def transformer() -> Any:
    """Two blocks with masks, over an embedding that the last stage uses, too."""
    import keras

    layers = keras.layers

    class TiedEmbedding(layers.Embedding):
        def call(self, x: Any, reverse: bool = False) -> Any:
            return keras.ops.matmul(x, keras.ops.transpose(self.embeddings)) if reverse else super().call(x)

        def compute_output_spec(self, x: Any, reverse: bool = False) -> Any:
            width = self.input_dim if reverse else self.output_dim
            return keras.KerasTensor((*x.shape[:-1], width) if reverse else (*x.shape, width))

        def compute_mask(self, x: Any, mask: Any = None) -> Any:
            return None if "float" in str(x.dtype) else super().compute_mask(x, mask)

    tokens = keras.Input((LENGTH,), dtype="int32")
    embedding = TiedEmbedding(WORDS, MODEL_WIDTH, mask_zero=True)
    x = embedding(tokens)
    for block in range(2):
        attended = layers.MultiHeadAttention(4, 16, name=f"attention_{block}")(x, x)
        x = layers.LayerNormalization()(layers.Add()([x, attended]))
        x = layers.Dense(MODEL_WIDTH, "gelu", name=f"dense_{block}")(x)
    return keras.Model(tokens, embedding(x, reverse=True))


def _pair(first: str, second: str, nbytes: float) -> Links:
    return {(first, second): nbytes, (second, first): nbytes}


def _sum(*parts: Links) -> Links:
    total: Counter[tuple[str, str]] = Counter()
    for part in parts:
        for link, nbytes in part.items():
            total[link] += nbytes  # type: ignore[assignment]
    return dict(total)


def mlp_formula(stages: int, columns: int, gradient_size: int) -> Links:
    """Bytes a step by link: batches, activations and their gradients, sums over columns."""
    rows, targets = ROWS / columns, 8
    links = []
    for column in range(columns):
        of_column = [f"worker:{column * stages + stage}" for stage in range(stages)]
        links.append({("chief", of_column[0]): rows * WIDTH * 4})
        links += [_pair(one, other, rows * WIDTH * 4) for one, other in zip(of_column, of_column[1:], strict=False)]
        links.append({("chief", of_column[-1]): rows * targets})
        if column:  # metrics are computed in the first column
            first = f"worker:{stages - 1}"
            links.append({("chief", first): rows * targets, (of_column[-1], first): rows * CLASSES * 4})
    if columns == 2:  # two stages: layers 0 to 2, and the others
        hidden, last = WIDTH * (WIDTH + 1), (WIDTH + 1) * CLASSES
        for stage, elements in enumerate((3 * hidden, (HIDDEN - 3) * hidden + last)):
            links.append(_pair(f"worker:{stage}", f"worker:{stages + stage}", elements * gradient_size))
    return _sum(*links)


def transformer_formula() -> Links:
    """Two stages, cut before the second block, in two columns: also the tied embedding. `Add` drops the mask."""
    rows = SEQUENCES / 2
    width, table = MODEL_WIDTH, WORDS * MODEL_WIDTH * 4
    attention = 4 * (width * width + width)
    block = attention + 2 * width + width * width + width
    activation = rows * LENGTH * width * 4
    links = []
    for first, last in (("worker:0", "worker:1"), ("worker:2", "worker:3")):
        links.append(_pair(first, last, activation + table))  # the table's value, and its gradient
        links.append({("chief", first): rows * LENGTH * 4})
        links.append({("chief", last): rows * LENGTH * 8})
    links.append({("chief", "worker:1"): rows * LENGTH * 8, ("worker:3", "worker:1"): rows * LENGTH * WORDS * 4})
    links.append(_pair("worker:0", "worker:2", block * 4 + table))
    links.append(_pair("worker:1", "worker:3", block * 4))
    return _sum(*links)


def cases() -> dict[str, tuple[Callable[[], Any], dict[str, Any], dict[str, Any], Links]]:
    """By name: the model, arguments of Adam, those of the strategy, and the bytes a step by link."""
    two = {"stages": 2, "data_parallel": 2}
    clipped = {"use_ema": True, "ema_overwrite_frequency": 3}
    cuts = ["hidden_3"]
    return {
        "MLP, 4 stages": (mlp, {}, {"stages": 4}, mlp_formula(4, 1, 4)),
        "MLP, 4 stages, global_clipnorm, EMA": (
            mlp,
            {"global_clipnorm": 0.1, **clipped},
            {"stages": 4},
            mlp_formula(4, 1, 4),
        ),
        "MLP, 2 stages, 2 columns, clipnorm, EMA": (
            mlp,
            {"clipnorm": 0.1, **clipped},
            {**two, "cuts": cuts},
            mlp_formula(2, 2, 4),
        ),
        "MLP, 2 stages, 2 columns, bf16": (
            mlp,
            {},
            {**two, "cuts": cuts, "compression": "bf16"},
            mlp_formula(2, 2, 2),
        ),
        "transformer, 2 stages, 2 columns, global_clipnorm, EMA": (
            transformer,
            {"global_clipnorm": 0.1, **clipped},
            {**two, "cuts": ["attention_1"]},
            transformer_formula(),
        ),
    }


@contextmanager
def cluster() -> Iterator[dict[int, str]]:
    """Starts the servers and connects to them; yields the names of all processes by pid."""
    import tensorflow as tf

    spec = {"worker": [f"127.0.0.1:{_free_port()}" for _ in range(SERVERS)], "chief": [f"127.0.0.1:{_free_port()}"]}
    command = [sys.executable, __file__, "--serve", json.dumps(spec)]
    servers = [subprocess.Popen([*command, str(index)], stderr=subprocess.DEVNULL) for index in range(SERVERS)]
    try:
        tf.config.experimental_connect_to_cluster(tf.train.ClusterSpec(spec), job_name="chief", task_index=0)
        yield {os.getpid(): "chief", **{server.pid: f"worker:{index}" for index, server in enumerate(servers)}}
    finally:
        for server in servers:
            server.kill()
            server.wait()


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def serve(spec: str, index: int) -> None:
    """Runs one server until it is killed."""
    import tensorflow as tf

    config = tf.compat.v1.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=2)
    tf.distribute.Server(json.loads(spec), job_name="worker", task_index=index, config=config, protocol="grpc").join()


def sent_by_sockets(names: dict[int, str]) -> Counter[tuple[str, str]]:
    """Returns the bytes that the processes have sent to each other so far."""
    text = subprocess.run(["ss", "-tinpH"], capture_output=True, text=True, check=True).stdout
    ends = {}
    for found in re.finditer(r"^\S+ +\d+ +\d+ +(\S+) +(\S+) +.*?pid=(\d+).*\n\s+(.*)$", text, re.MULTILINE):
        here, there, pid, details = found.groups()
        sent = re.search(r"bytes_sent:(\d+)", details)
        ends[here, there] = names.get(int(pid)), int(sent[1]) if sent else 0
    total: Counter[tuple[str, str]] = Counter()
    for (here, there), (source, nbytes) in ends.items():
        target, _ = ends.get((there, here), (None, 0))
        if source is not None and target is not None:
            total[source, target] += nbytes
    return total


def settled(names: dict[int, str]) -> Counter[tuple[str, str]]:
    """Returns the bytes of the sockets once nothing more is sent."""
    before, deadline = sent_by_sockets(names), time.monotonic() + 60
    while time.monotonic() < deadline:
        time.sleep(_QUIET_SECONDS)
        now = sent_by_sockets(names)
        if sum((now - before).values()) < 1000:
            return now
        before = now
    raise TimeoutError("The servers still send. Received: traffic for 60 s after `fit`. Expected: none.")


def measure(name: str, names: dict[int, str]) -> list[dict[str, Any]]:
    """Trains one case; returns by link its bytes a step: by formula, counted, and on the sockets."""
    import keras
    import numpy as np
    import tensorflow as tf

    from tfdist.strategies import ModelParallelStrategy, Pipeline

    build, of_optimizer, options, formula = cases()[name]
    stages, columns = options["stages"], options.get("data_parallel", 1)
    strategy = ModelParallelStrategy(
        [f"/job:worker/task:{index}/device:CPU:0" for index in range(stages * columns)],
        pipeline=Pipeline(stages=stages, micro_batches=MICRO_BATCHES, cuts=options.get("cuts")),
        data_parallel=columns,
        compression=options.get("compression"),
    )
    with strategy.scope():
        model = build()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(1e-3, **of_optimizer), loss, metrics=["accuracy"])
    rng = np.random.default_rng(0)
    if build is mlp:
        batch = rng.normal(size=(ROWS, WIDTH)).astype("float32"), rng.integers(0, CLASSES, ROWS)
    else:
        batch = rng.integers(0, WORDS, (SEQUENCES, LENGTH), "int32"), rng.integers(0, WORDS, (SEQUENCES, LENGTH))
    data = tf.data.Dataset.from_tensors(batch).repeat(STEPS)
    model.fit(data.take(2), verbose=0)  # traced, and the connections made
    sent, counted = settled(names), strategy.communication_by_link("train_step")
    model.fit(data, verbose=0)
    sent_later, counted_later = settled(names), strategy.communication_by_link("train_step")
    of_sockets = sent_later - sent
    rows = {}
    for (source, target), stats in counted_later.items():
        link = _process(source), _process(target)
        before = counted.get((source, target))
        rows[link] = (stats.total_bytes - (before.total_bytes if before else 0)) / STEPS
    links = sorted({*of_sockets, *rows, *formula})
    return [
        {
            "link": " -> ".join(link),
            "formula": formula.get(link, 0.0),
            "counted": rows.get(link, 0.0),
            # Keras replaces the weights by their averages when `fit` ends: bytes divided by the steps.
            "end_of_fit": formula[link] / STEPS
            if columns == 2 and "use_ema" in of_optimizer and link in _COPIES
            else 0.0,
            "sent": of_sockets[link] / STEPS,
        }
        for link in links
    ]


def _process(device: str) -> str:
    job, task = re.findall(r"/job:(\w+)/.*task:(\d+)", device)[0]
    return "chief" if job == "chief" else f"{job}:{task}"


def main() -> None:
    """Measures the cases and writes the result."""
    parser = argparse.ArgumentParser(description="Bytes of the links between stages.")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/stage_links.json"))
    parser.add_argument("--case", action="append", choices=list(cases()))
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        return serve(arguments.serve[0], int(arguments.serve[1]))
    with cluster() as names:
        result = {}
        for name in arguments.case or cases():
            result[name] = measure(name, names)
            print(name)
            for row in result[name]:
                print("  {link:24}{formula:14,.0f}{counted:14,.0f}{sent:14,.0f}".format(**row), flush=True)
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
