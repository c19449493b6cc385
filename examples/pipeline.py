"""Trains a transformer on the text of Python's library, in stages on workers none of which may hold all of it.

    tfdist run --chief --workers 3 examples/pipeline.py

The model predicts the next word. With Adam its variables take more memory than `--limit_mb` allows a worker, so its
layers are cut into as many stages as there are workers. The output shows the stages, the megabytes that each worker
holds, the accuracy on held-out files, and what a step sends.

    tfdist run --chief --workers 4 examples/pipeline.py --ways 2

The same with two stages, each of which is split over two workers: of attention each has half of the heads, of Dense
layers and of the vocabulary a half of the columns or rows.
"""

import re
import sysconfig
from collections import Counter
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags, logging

from tfdist import cluster
from tfdist.callbacks import CommunicationReport
from tfdist.strategies import ModelParallelStrategy, Pipeline, auto_layout

_STEPS = flags.DEFINE_integer("steps", 400, "Steps of training.", lower_bound=1)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 32, "Windows of text in a batch.", lower_bound=1)
_MICRO_BATCHES = flags.DEFINE_integer("micro_batches", 4, "Parts of a batch.", lower_bound=1)
_BLOCKS = flags.DEFINE_integer("blocks", 6, "Blocks of attention and dense layers.", lower_bound=1)
_WIDTH = flags.DEFINE_integer("width", 96, "Values for each word.", lower_bound=8)
_WAYS = flags.DEFINE_integer("ways", 1, "Workers over which the layers of a stage are split.", lower_bound=1)
_LIMIT_MB = flags.DEFINE_float("limit_mb", 8.0, "Megabytes of variables that a worker may hold.", lower_bound=0.1)

_WORDS, _LENGTH, _HEADS = 2000, 32, 4
_HELD_OUT_EVERY = 10


def read_text() -> tuple[np.ndarray, np.ndarray]:
    """Returns the numbers of the words of the library's top-level modules: for training, and held out."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [re.findall(r"\w+|\S", file.read_text(encoding="utf-8", errors="ignore")) for file in files]
    frequent = Counter(word for text in texts for word in text).most_common(_WORDS - 1)
    number = {word: place for place, (word, _) in enumerate(frequent, 1)}  # 0: all others
    parts: tuple[list[int], list[int]] = ([], [])
    for index, text in enumerate(texts):
        parts[index % _HELD_OUT_EVERY == 0].extend(number.get(word, 0) for word in text)
    return np.array(parts[0], np.int32), np.array(parts[1], np.int32)


def windows(words: np.ndarray, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns windows of text, and the words that follow each of their words."""
    starts = np.random.default_rng(seed).integers(0, len(words) - _LENGTH - 1, count)
    places = starts[:, None] + np.arange(_LENGTH)
    return words[places], words[places + 1]


def build_model() -> keras.Model:
    """Returns the transformer; nothing in it refers to stages."""
    layers, width = keras.layers, _WIDTH.value
    words = keras.Input((_LENGTH,), dtype="int32")
    x = layers.Embedding(_WORDS, width, name="words")(words)
    x = Positions(name="positions")(x)
    for _ in range(_BLOCKS.value):
        attended = layers.LayerNormalization()(x)
        attended = layers.MultiHeadAttention(_HEADS, width // _HEADS)(attended, attended, use_causal_mask=True)
        x = layers.Add()([x, attended])
        hidden = layers.Dense(4 * width, "gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(width)(hidden)])
    return keras.Model(words, layers.Dense(_WORDS, name="logits")(layers.LayerNormalization()(x)))


class Positions(keras.layers.Layer):
    """Adds a row of a table for each position."""

    def build(self, shape: tuple[int | None, ...]) -> None:
        self.table = self.add_weight(shape=(shape[1], shape[2]), initializer="uniform", name="table")

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return x + self.table


def layout_of_model() -> Any:
    """Returns how variables are split over the workers of a stage; None if they are not."""
    if _WAYS.value == 1:
        return None
    layout_map = auto_layout(build_model(), _WAYS.value)
    keras.utils.clear_session()  # the model that is trained gets the same names
    return layout_map


def main(argv: list[str]) -> None:
    """Trains, and prints what each worker holds."""
    del argv
    logging.set_verbosity(logging.WARNING)  # TensorFlow logs the cluster
    config = cluster.detect()
    workers = len(config.cluster.jobs["worker"]) if config else len(tf.config.list_logical_devices("CPU"))
    pipeline = Pipeline(stages=workers // _WAYS.value, micro_batches=_MICRO_BATCHES.value)
    strategy = ModelParallelStrategy(pipeline=pipeline, layout_map=layout_of_model())
    with strategy.scope():
        model = build_model()
        model.compile(
            keras.optimizers.Adam(2e-3),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    strategy.summary(model)
    train, held_out = read_text()
    x, y = windows(train, _STEPS.value * _BATCH_SIZE.value, seed=1)
    report = CommunicationReport()
    model.fit(x, y, batch_size=_BATCH_SIZE.value, epochs=2, steps_per_epoch=-(-_STEPS.value // 2), callbacks=[report])
    held = {device: size / 1e6 for device, size in strategy.variable_bytes_by_device(model).items()}
    for device in sorted(held):
        print(f"{device}: {held[device]:.1f} MB of variables")
    accuracy = model.evaluate(*windows(held_out, 256, seed=2), batch_size=_BATCH_SIZE.value, verbose=0)[1]
    total, largest = sum(held.values()), max(held.values())
    print(
        f"pipeline: {total:.1f} MB of variables in {pipeline.stages} stages, at most {largest:.1f} MB on a worker "
        f"(limit {_LIMIT_MB.value:g}); {accuracy:.1%} of the next words on held-out files are right"
    )
    if largest > _LIMIT_MB.value:
        raise SystemExit(
            f"A worker holds more than {_LIMIT_MB.value:g} MB. Start more workers (tfdist run --workers N)."
        )


if __name__ == "__main__":
    app.run(main)
