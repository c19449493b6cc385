"""Programs that were written for one process: they draw, shuffle, split and number without a seed.

Each worker runs them one after another, each from the random state with which its process began, as a process of its
own would. In attempt k the first program that is not complete is killed in its second epoch; the next attempt resumes
it.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

BEGINNING = random.getstate()

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

from tfdist.callbacks import FailureRecovery  # noqa: E402
from tfdist.strategies import MultiWorkerMirroredStrategy  # noqa: E402

NUMPY_BEGINNING = np.random.get_state()
SAMPLES, TRAINED, BATCH, EPOCHS = 48, 36, 6, 2
STEPS = TRAINED // BATCH
NAMES = [f"class {number}" for number in range(8)]
IDS = np.arange(SAMPLES)


def arrays(ids, labels=None):
    ids = np.asarray(ids)
    x = np.stack([ids, ids % 5], 1).astype("float32")
    return x, (ids % 8 if labels is None else labels[ids]).astype("float32")


def split(order):
    return list(order)[:TRAINED], list(order)[TRAINED:]


class Epochs(keras.utils.PyDataset):
    """The generator of batches that everybody copies."""

    def __init__(self, ids, shuffle, **options):
        super().__init__(**options)
        self.ids, self.shuffle = list(ids), shuffle
        self.on_epoch_end()

    def __len__(self):
        return STEPS

    def __getitem__(self, index):
        return arrays(self.ids[index * BATCH : (index + 1) * BATCH])

    def on_epoch_end(self):
        self.shuffle(self.ids)


def endless(ids, shuffle):
    ids = list(ids)
    while True:
        shuffle(ids)
        for step in range(STEPS):
            yield arrays(ids[step * BATCH : (step + 1) * BATCH])


def shuffled(shuffle):
    ids = list(IDS)
    shuffle(ids)
    return ids


def by_random_numbers(draw):
    order = sorted(IDS, key=lambda _: draw())
    return {"train": order[:TRAINED], "rest": order[TRAINED:]}


def fixed(train=IDS[:TRAINED], **more):
    return {"train": train, "rest": IDS[TRAINED:], **more}


def from_split(order):
    train, rest = split(order)
    return {"train": train, "rest": rest}


def pandas_sample():
    import pandas

    frame = pandas.DataFrame({"id": IDS})
    train = frame.sample(TRAINED)
    return {"train": train["id"].tolist(), "rest": frame.drop(train.index)["id"].tolist()}


def sklearn_split():
    from sklearn.model_selection import train_test_split

    train, rest = train_test_split(IDS, train_size=TRAINED)
    return {"train": train, "rest": rest}


def labels_by_set():
    number_of = {name: number for number, name in enumerate(set(NAMES))}
    return fixed(labels=np.array([number_of[NAMES[sample % 8]] for sample in IDS]))


def split_by_hash():
    return from_split(sorted(IDS, key=lambda sample: hash(f"image {sample}.png")))


def slices(ids, shuffle=False):
    data = tf.data.Dataset.from_tensor_slices(arrays(ids))
    return (data.shuffle(SAMPLES) if shuffle else data).batch(BATCH, drop_remainder=True)


def from_generator():
    def samples():
        for sample in np.random.permutation(TRAINED):
            x, y = arrays([sample])
            yield x[0], y[0]

    spec = (tf.TensorSpec([2], tf.float32), tf.TensorSpec([], tf.float32))
    data = tf.data.Dataset.from_generator(samples, output_signature=spec)
    return data.apply(tf.data.experimental.assert_cardinality(TRAINED)).batch(BATCH, drop_remainder=True)


def augmented():
    def change(x, y):
        return x + [0.0, 1.0] * tf.random.normal([2]), y

    data = tf.data.Dataset.from_tensor_slices(arrays(IDS[:TRAINED])).shuffle(SAMPLES)
    return data.map(change, num_parallel_calls=4).batch(BATCH, drop_remainder=True)


# What each program trains on: the samples of both sides of a split; labels; the data, if not arrays of the samples.
PROGRAMS = {
    "np.random.permutation": lambda: from_split(np.random.permutation(SAMPLES)),
    "np.random.shuffle": lambda: from_split(shuffled(np.random.shuffle)),
    "np.random.choice": lambda: from_split(np.random.choice(SAMPLES, SAMPLES, replace=False)),
    "np.random.rand": lambda: by_random_numbers(np.random.rand),
    "np.random.randint": lambda: by_random_numbers(lambda: np.random.randint(1 << 30)),
    "random.shuffle": lambda: from_split(shuffled(random.shuffle)),
    "random.sample": lambda: from_split(random.sample(list(IDS), SAMPLES)),
    "random.random": lambda: by_random_numbers(random.random),
    "DataFrame.sample": pandas_sample,
    "train_test_split": sklearn_split,
    "shuffle=True": lambda: fixed(shuffle=True),
    "list(set(labels))": labels_by_set,
    "hash of a name": split_by_hash,
    "PyDataset, np.random": lambda: fixed(data=Epochs(IDS[:TRAINED], np.random.shuffle)),
    "PyDataset, random": lambda: fixed(data=Epochs(IDS[:TRAINED], random.shuffle)),
    "PyDataset, a thread": lambda: fixed(data=Epochs(IDS[:TRAINED], np.random.shuffle, workers=1, max_queue_size=4)),
    "generator, np.random": lambda: fixed(data=endless(IDS[:TRAINED], np.random.shuffle)),
    "generator, random": lambda: fixed(data=endless(IDS[:TRAINED], random.shuffle)),
    "from_generator": lambda: fixed(data=from_generator()),
    "tf.data, shuffle": lambda: fixed(data=slices(IDS[:TRAINED], shuffle=True)),
    "tf.data, augmented": lambda: fixed(data=augmented()),
    "tf.data of a shuffled list": lambda: fixed(data=slices(shuffled(np.random.shuffle)[:TRAINED])) | {"train": None},
    "tf.random.shuffle": lambda: from_split(tf.random.shuffle(IDS).numpy()),
}
# What nothing makes equal: each of these ends with an error on every worker.
DIFFERING = {
    "default_rng": lambda: from_split(np.random.default_rng().permutation(SAMPLES)),
    "random.Random": lambda: fixed(data=Epochs(IDS[:TRAINED], random.Random().shuffle)),
    "SystemRandom": lambda: fixed(data=endless(IDS[:TRAINED], random.SystemRandom().shuffle)),
    "a clock": lambda: from_split(np.random.RandomState(time.time_ns() % (1 << 32)).permutation(SAMPLES)),
    "labels": lambda: fixed(labels=np.random.default_rng().permutation(SAMPLES)),
}


class Recording(keras.Sequential):
    """A model that notes which samples each step has seen."""

    def train_step(self, data):
        step = tf.convert_to_tensor(self.optimizer.iterations)
        tf.numpy_function(self.note, [step, data[0][:, 0]], [])
        return super().train_step(data)


class KillInSecondEpoch(keras.callbacks.Callback):
    def __init__(self, rank):
        super().__init__()
        self.rank, self.epoch = rank, 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if self.epoch == 1 and batch == 3 and self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def run(name, program, strategy, folder, callbacks):
    """Trains, and writes the split, the labels and the samples of each step."""
    random.setstate(BEGINNING)
    np.random.set_state(NUMPY_BEGINNING)
    tf.random.set_seed(int(os.environ["TFDIST_SEED"]))  # starts TensorFlow's sequence again
    if os.environ.get("WITHOUT_SEED"):
        random.seed()
        np.random.seed()
    keras.backend.clear_session()
    plan = program()
    train, labels = plan["train"], plan.get("labels")
    files = f"{name.replace('/', ' ')}-{os.environ['TFDIST_ATTEMPT']}-{strategy.rank}"
    chosen = {
        "train": None if train is None else sorted(map(int, train)),
        "rest": sorted(map(int, plan["rest"])),
        "labels": None if labels is None else labels.tolist(),
    }
    (folder / f"split-{files}.json").write_text(json.dumps(chosen))
    steps = (folder / f"steps-{files}.jsonl").open("w", buffering=1)
    with strategy.scope():
        model = Recording([keras.Input((2,)), keras.layers.Dense(1)])
        object.__setattr__(
            model, "note", lambda step, ids: steps.write(json.dumps([int(step), [int(i) for i in ids]]) + "\n") and None
        )
        model.compile(keras.optimizers.SGD(1e-6), "mse")
    options = {"steps_per_epoch": STEPS} if name.startswith(("generator", "SystemRandom")) else {}
    data = plan.get("data")
    given = (data,) if data is not None else arrays(train, labels)
    if data is None:
        options |= {"batch_size": BATCH, "shuffle": plan.get("shuffle", False)}
    recovery = FailureRecovery(folder / f"saved-{name}", every_steps=2, replay_data=name.startswith("generator"))
    model.fit(*given, epochs=EPOCHS, verbose=0, callbacks=[*callbacks, recovery], **options)
    model.evaluate(*arrays(plan["rest"], labels), batch_size=BATCH, verbose=0)


def main():
    folder, names = Path(sys.argv[1]), sys.argv[2].split("|")
    strategy = MultiWorkerMirroredStrategy()
    done = {name: (folder / f"done-{name}").exists() for name in names}
    waiting = [name for name in names if not done[name]]
    for name in waiting:
        was_killed = (folder / f"saved-{name}").exists()
        is_left_alone = was_killed or "once" not in sys.argv
        kill = [] if is_left_alone else [KillInSecondEpoch(strategy.rank)]
        run(name, (PROGRAMS | DIFFERING)[name], strategy, folder, kill)
        (folder / f"done-{name}").touch()


if __name__ == "__main__":
    main()
