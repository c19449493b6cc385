"""The digits of scikit-learn as a TensorFlow Datasets builder: real images without a download."""

import contextlib
import fcntl
import functools
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds
from sklearn.datasets import load_digits

HELD_OUT_EVERY = 5


class Digits(tfds.core.GeneratorBasedBuilder):
    """1,797 handwritten digits, 8x8 pixels, grayscale, from 43 people (UCI ML, "Optical Recognition of ... Digits").

    The splits are fixed. In the order of scikit-learn's file, every fifth image of each digit is held out (`test`, 355
    images); the others are `train` (1,442). So both contain all digits and all parts of the file, hence all writers.
    """

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "First release."}

    def _info(self) -> tfds.core.DatasetInfo:
        features = {
            "image": tfds.features.Image(shape=(8, 8, 1), dtype=np.uint8, doc="0 is paper, 255 is ink"),
            "label": tfds.features.ClassLabel(num_classes=10),
            "index": tfds.features.Scalar(np.int64, doc="the image's index in scikit-learn's file"),
        }
        return tfds.core.DatasetInfo(
            builder=self,
            description=self.__doc__,
            features=tfds.features.FeaturesDict(features),
            supervised_keys=("image", "label"),
            homepage="https://archive.ics.uci.edu/dataset/80",
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Any]:
        return {"train": self._generate_examples(held_out=False), "test": self._generate_examples(held_out=True)}

    def _generate_examples(self, held_out: bool) -> Iterator[tuple[int, dict[str, Any]]]:
        digits = load_digits()
        images = np.rint(digits.images * (255 / 16)).astype(np.uint8)[..., np.newaxis]  # the file has values of 0 to 16
        seen: Counter[int] = Counter()
        for index, (image, label) in enumerate(zip(images, digits.target.tolist(), strict=True)):
            seen[label] += 1
            if (seen[label] % HELD_OUT_EVERY == 0) == held_out:
                yield index, {"image": image, "label": label, "index": index}


def load(name: str, data_dir: str | None) -> tuple[tf.data.Dataset, tf.data.Dataset]:
    """Returns the training and the held-out (image, label) pairs of a dataset, always in the same order.

    Args:
            name: `digits`, which needs no network, or `mnist`, which is downloaded once.
            data_dir: Directory of prepared data; by default that of TensorFlow Datasets.

    Raises:
            RuntimeError: The dataset cannot be prepared.
    """
    tfds.disable_progress_bar()
    builder_of = Digits if name == "digits" else functools.partial(tfds.builder, name, try_gcs=False)
    builder = _prepared(functools.partial(builder_of, data_dir=data_dir))
    train, test = builder.as_dataset(split=["train", "test"], as_supervised=True)
    return train, test


def _prepared(make_builder: Callable[[], tfds.core.DatasetBuilder]) -> tfds.core.DatasetBuilder:
    """Returns a builder whose dataset is on disk. One process of a host at a time writes; the others find it there."""
    root = Path(make_builder().data_dir).parent
    root.mkdir(parents=True, exist_ok=True)
    with open(root / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        builder = make_builder()  # a builder reads the disk once, when it is created
        try:
            if builder.name != "digits" and not builder.is_prepared() and _has_no_network():
                raise ConnectionError("the loopback is the only network interface")
            # It prints that it downloads, whatever it does.
            with contextlib.redirect_stdout(None):
                builder.download_and_prepare(download_config=tfds.download.DownloadConfig(try_download_gcs=False))
        except OSError as error:  # errors of `requests` are OSErrors, too
            raise RuntimeError(
                f"{builder.name} cannot be prepared in {builder.data_dir}. Received: {type(error).__name__}: {error}. "
                "Expected: a writable directory and, for mnist, a network: `tfdist run` gives a chief and its workers "
                "a private one. Run `tfdist run --network host ...`, or once without the launcher "
                "(`python examples/digits.py --dataset mnist`), or use `--dataset digits`."
            ) from error
    return builder


def _has_no_network() -> bool:
    """Detects at once what TensorFlow Datasets would find after minutes of retries."""
    return all(name == "lo" for _, name in socket.if_nameindex())
