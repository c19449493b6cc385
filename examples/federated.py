"""Trains digits by federated averaging: ten clients, each with images of two digits only, on two or three workers.

    tfdist run --workers 3 --parameter-servers 1 examples/federated.py

Each client's images are in a separate file, which only the client's worker reads. In a round every client trains ten
small batches by itself and sends how its weights have changed; the server applies the clients' mean by Adam.
"""

import tempfile
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags, logging
from digits_dataset import load

from tfdist.callbacks import WorkerReport
from tfdist.strategies import FederatedAveraging, ParameterServerStrategy

CLIENTS = 10
_ROUNDS = flags.DEFINE_integer("rounds", 40, "Rounds of all clients.", lower_bound=1)
_EPOCH_ROUNDS = 10
_LOCAL_STEPS = flags.DEFINE_integer("local_steps", 10, "Batches of a client in a round.", lower_bound=1)
_CLIENTS_PER_ROUND = flags.DEFINE_integer("clients_per_round", CLIENTS, "How many clients are chosen for a round.")
_SERVER_OPTIMIZER = flags.DEFINE_enum(
    "server_optimizer", "adam", ["adam", "mean"], "FedAdam, or the mean of the clients' weights (FedAvg)."
)
_PROXIMAL = flags.DEFINE_float("proximal", 0.0, "The factor of FedProx's term.")
_COMPRESSION = flags.DEFINE_string("compression", None, 'How differences are encoded, such as "int8".')
_DEADLINE_SECONDS = flags.DEFINE_float("deadline_seconds", None, "After which a round does not wait for slow clients.")
_DATA_DIR = flags.DEFINE_string("data_dir", None, "Directory of prepared data. Default: that of TensorFlow Datasets.")
_SEED = flags.DEFINE_integer("seed", 0, "For the initial weights and the order of the images.")

_FEATURES = {"image": tf.io.FixedLenFeature([64], tf.float32), "label": tf.io.FixedLenFeature([], tf.int64)}


def write_clients(images: np.ndarray, labels: np.ndarray, folder: Path) -> None:
    """Writes a file for each client: half of the images of digit c, and half of those of digit c + 1.

    It stands for what in a real federation is where it was made.
    """
    for client in range(CLIENTS):
        first, second = np.flatnonzero(labels == client)[::2], np.flatnonzero(labels == (client + 1) % CLIENTS)[1::2]
        with tf.io.TFRecordWriter(str(folder / f"client-{client}.tfrecord")) as writer:
            for index in [*first, *second]:
                pixels = tf.train.Feature(float_list=tf.train.FloatList(value=images[index]))
                label = tf.train.Feature(int64_list=tf.train.Int64List(value=[labels[index]]))
                example = tf.train.Example(features=tf.train.Features(feature={"image": pixels, "label": label}))
                writer.write(example.SerializeToString())


def parsed(record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the image and the label of a record."""
    example = tf.io.parse_single_example(record, _FEATURES)
    return example["image"], example["label"]


def build_model() -> keras.Model:
    """Builds and compiles a small dense network. Its optimizer is that of the clients."""
    layers = [keras.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)]
    model = keras.Sequential(layers)
    model.compile(
        optimizer=keras.optimizers.SGD(0.05),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def arrays(images: tf.data.Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Returns the pixels, from 0 to 1, and the labels."""
    pixels, labels = zip(*images.as_numpy_iterator(), strict=True)
    return (np.stack(pixels) / 255).reshape(-1, 64).astype("float32"), np.asarray(labels)


def main(_: list[str]) -> None:
    """Trains on the cluster; prints the workers' statistics and the accuracy."""
    logging.set_verbosity(logging.WARNING)
    mode = FederatedAveraging(
        local_steps=_LOCAL_STEPS.value,
        clients=CLIENTS,
        clients_per_round=_CLIENTS_PER_ROUND.value,
        server_optimizer=keras.optimizers.Adam(0.03, beta_2=0.99, epsilon=1e-3)
        if _SERVER_OPTIMIZER.value == "adam"
        else None,
        proximal=_PROXIMAL.value,
        deadline_seconds=_DEADLINE_SECONDS.value,
        seed=_SEED.value,
    )
    strategy = ParameterServerStrategy(mode=mode, compression=_COMPRESSION.value)
    images, held_out = load("digits", _DATA_DIR.value)
    with tempfile.TemporaryDirectory() as folder:
        write_clients(*arrays(images), Path(folder))

        def dataset_fn(context: tf.distribute.InputContext) -> tf.data.Dataset:
            client = context.input_pipeline_id
            records = tf.data.TFRecordDataset(f"{folder}/client-{client}.tfrecord")
            return records.map(parsed).cache().shuffle(200, seed=client).repeat().batch(16)

        keras.utils.set_random_seed(_SEED.value)
        with strategy.scope():
            model = build_model()
        data = strategy.distribute_datasets_from_function(dataset_fn)
        epochs = -(-_ROUNDS.value // _EPOCH_ROUNDS)
        rounds = min(_ROUNDS.value, _EPOCH_ROUNDS)
        model.fit(data, steps_per_epoch=rounds, epochs=epochs, verbose=2, callbacks=[WorkerReport()])
    _, accuracy = model.evaluate(*arrays(held_out), batch_size=64, verbose=0)
    done = int(model.optimizer.iterations.numpy())
    print(f"federated digits: {CLIENTS} clients, {done} rounds, {accuracy:.1%} held-out accuracy".replace("%", " %"))


if __name__ == "__main__":
    app.run(main)
