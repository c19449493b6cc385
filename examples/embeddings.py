"""Trains word embeddings in tables that are split over two parameter servers, on the text of Python's library.

    tfdist run --workers 2 --parameter-servers 2 examples/embeddings.py

A word is predicted from the eight words around it (CBOW): the mean of their rows in one table is trained to be near the
word's row in another table. A step pulls and pushes only the rows that its words use. Each worker reads the text
itself. The last lines print the accuracy on held-out files, the nearest words of a few words, and the bytes per step.
"""

import re
import sysconfig
import tempfile
from collections import Counter
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags, logging

from tfdist.strategies import ParameterServerStrategy

_STEPS = flags.DEFINE_integer("steps", 900, "Pushes of all workers together.", lower_bound=1)
_EPOCHS = flags.DEFINE_integer("epochs", 3, "Number of epochs; each has steps/epochs pushes.", lower_bound=1)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 256, "Words in a push.", lower_bound=1)
_DIMENSIONS = flags.DEFINE_integer("dimensions", 64, "Dimension of a word's row.", lower_bound=1)
_COMPRESSION = flags.DEFINE_string(
    "compression", None, 'How pushed rows are encoded, such as "int8". Default: uncompressed.'
)

_SIDE = 4  # words to the left, and to the right
_OTHERS = 15  # wrong words among which the right one is to be found
_BLOCK = 512
_HELD_OUT_EVERY = 10
_TESTS = {"test", "tests", "idlelib", "site-packages", "dist-packages"}  # not part of every Python
_SHOWN = ("append", "int", "socket", "month")
_AMONG = 3000  # most frequent words, among which the nearest are sought


def read_words() -> tuple[list[str], np.ndarray, np.ndarray]:
    """Reads the sources of the standard library.

    Returns:
        All words, the most frequent first; the numbers of the words of the training files, in order; and those of the
        held-out files.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = [file for file in sorted(root.rglob("*.py")) if not _TESTS & set(file.relative_to(root).parts)]
    parts: tuple[list[str], list[str]] = ([], [])
    for index, file in enumerate(files):
        text = file.read_text(encoding="utf-8", errors="ignore")
        parts[index % _HELD_OUT_EVERY == _HELD_OUT_EVERY - 1].extend(re.findall(r"[A-Za-z_]\w+", text))
    words = [word for word, _ in Counter(parts[0] + parts[1]).most_common()]
    number = {word: place for place, word in enumerate(words)}
    train, held_out = (np.array([number[word] for word in part], np.int32) for part in parts)
    return words, train, held_out


def batches(file: str) -> tf.data.Dataset:
    """Words and the words around them, from a file of int32 numbers, repeated indefinitely in random orders."""
    blocks = tf.data.FixedLengthRecordDataset(file, 4 * _BLOCK).shuffle(10_000)
    return (
        blocks.map(lambda block: tf.signal.frame(tf.io.decode_raw(block, tf.int32), 2 * _SIDE + 1, 1))
        .unbatch()
        .shuffle(20_000)
        .batch(_BATCH_SIZE.value, drop_remainder=True)
        .map(_example)
        .repeat()
        .prefetch(4)
    )


def _example(windows: tf.Tensor) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
    """The words around, and 16 words to choose from: the right one first, then 15 from elsewhere in the batch."""
    right = windows[:, _SIDE]
    around = tf.concat([windows[:, :_SIDE], windows[:, _SIDE + 1 :]], 1)
    chosen = tf.stack([tf.roll(right, places * 7, 0) for places in range(_OTHERS + 1)], 1)
    return {"around": around, "chosen": chosen}, tf.zeros_like(right)


def build_model(words: int) -> keras.Model:
    """Builds two tables, and the similarity of a mean of rows of one to rows of the other."""
    around = keras.Input([2 * _SIDE], dtype="int32", name="around")
    chosen = keras.Input([_OTHERS + 1], dtype="int32", name="chosen")
    meaning = keras.layers.Embedding(words, _DIMENSIONS.value, name="words")(around)
    centres = keras.layers.Embedding(words, _DIMENSIONS.value, embeddings_initializer="zeros", name="centres")
    scores = keras.layers.Dot(axes=(1, 2))([keras.layers.GlobalAveragePooling1D()(meaning), centres(chosen)])
    model = keras.Model([around, chosen], scores)
    model.compile(
        optimizer=keras.optimizers.Adagrad(0.2, initial_accumulator_value=1e-6),  # changes pushed rows only
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def nearest(words: list[str], table: np.ndarray, word: str, count: int = 6) -> list[str]:
    """Returns the frequent words whose rows are most similar in direction to that of `word`."""
    rows = table[:_AMONG] / np.linalg.norm(table[:_AMONG], axis=1, keepdims=True)
    order = np.argsort(-rows @ rows[words.index(word)])
    return [words[place] for place in order if words[place] != word][:count]


def main(_: list[str]) -> None:
    """Trains on the cluster and prints the results."""
    logging.set_verbosity(logging.WARNING)
    strategy = ParameterServerStrategy(
        variable_partitioner=tf.distribute.experimental.partitioners.MinSizePartitioner(1 << 20, max_shards=2),
        compression=_COMPRESSION.value,
    )
    words, train, held_out = read_words()
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = build_model(len(words))
    with tempfile.TemporaryDirectory() as folder:
        for name, numbers in (("train", train), ("held_out", held_out)):
            numbers[: len(numbers) // _BLOCK * _BLOCK].tofile(Path(folder, name))
        model.fit(
            strategy.distribute_datasets_from_function(lambda _: batches(f"{folder}/train")),
            steps_per_epoch=_STEPS.value // _EPOCHS.value,
            epochs=_EPOCHS.value,
            validation_data=batches(f"{folder}/held_out").take(100),
            verbose=2,
        )
    table = np.asarray(model.get_layer("words").embeddings)
    for word in _SHOWN:
        print(f"{word}: {', '.join(nearest(words, table, word))}")
    print(summary(strategy, len(words)))


def summary(strategy: ParameterServerStrategy, words: int) -> str:
    """Describes the tables and the bytes that a step has sent."""
    stats, held = strategy.worker_stats, strategy.server_bytes
    steps, tables = sum(worker.steps for worker in stats), 2 * 4 * words * _DIMENSIONS.value
    pulled, pushed = (sum(getattr(worker, f"bytes_{way}") for worker in stats) / steps for way in ("pulled", "pushed"))
    servers = " + ".join(f"{size / 1e6:.1f}" for size in held)
    return (
        f"embeddings: two tables of {words:,} words, {tables / 1e6:.1f} MB, {servers} on {len(held)} "
        f"servers. A step pulled {pulled / 1e6:.2f} MB, {pulled / tables:.1%} of the tables, and pushed "
        f"{pushed / 1e6:.2f} MB, {pushed / tables:.1%}"
    ).replace("%", " %")


if __name__ == "__main__":
    app.run(main)
