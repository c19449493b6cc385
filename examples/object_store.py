"""Trains with its data and its checkpoints on S3; a worker is killed in the middle, and the training resumes.

    pip install 'tfdist[tensorflow,examples,remote]' pyarrow 'moto[server]'
    python examples/object_store.py

This needs no account: it starts the S3 server of moto on this host, which is meant for tests, in memory. With a bucket:

    python examples/object_store.py --url s3://bucket/digits

Credentials are the usual ones of AWS, such as `AWS_PROFILE`; for MinIO and other servers set `AWS_ENDPOINT_URL`,
`AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY`. The images (100 kB) are written to `data` below the address,
checkpoints to `checkpoints`.
"""

import logging
import os
import subprocess
import sys

import keras
import numpy as np
from absl import app, flags
from digits import build_model
from recovery import KillItself
from sklearn.datasets import load_digits

from tfdist import cluster
from tfdist.callbacks import FailureRecovery
from tfdist.data import from_parquet
from tfdist.strategies import MultiWorkerMirroredStrategy

_URL = flags.DEFINE_string("url", None, "Address of data and checkpoints. Default: on a server that is started.")
_FILES = 4


def work(url: str) -> None:
    """Trains as a worker, which reads its rows of the files and no others."""
    strategy = MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(flags.FLAGS.seed)
    images = from_parquet(f"{url}/data")
    dataset = images.dataset(
        flags.FLAGS.batch_size, features="image", label="label", shapes={"image": (8, 8, 1)}, shuffle=True
    )
    with strategy.scope():
        model = build_model((8, 8, 1))
    callbacks: list[keras.callbacks.Callback] = [
        FailureRecovery(f"{url}/checkpoints", every_steps=flags.FLAGS.every_steps)
    ]
    if os.environ.get("TFDIST_ATTEMPT", "0") == "0" and strategy.rank == 1:
        steps = -(-images.num_rows // flags.FLAGS.batch_size) * flags.FLAGS.epochs
        callbacks.append(KillItself(steps // 2))
    is_chief = strategy.rank == 0
    history = model.fit(dataset, epochs=flags.FLAGS.epochs, verbose=2 if is_chief else 0, callbacks=callbacks).history
    if is_chief:
        print(f"object store: {100 * history['accuracy'][-1]:.1f} % of the images in the last epoch", flush=True)


def write_images(url: str) -> None:
    """Writes the images as Parquet files, with several row groups: as many as workers at least."""
    import fsspec
    import pyarrow
    import pyarrow.parquet

    digits = load_digits()
    pixels = np.rint(digits.images * (255 / 16)).astype(np.uint8).reshape(-1, 64)  # the file has values of 0 to 16
    for number, rows in enumerate(np.array_split(np.arange(len(pixels)), _FILES)):
        table = pyarrow.table({"image": list(pixels[rows]), "label": digits.target[rows]})
        with fsspec.open(f"{url}/data/part-{number}.parquet", "wb") as file:
            pyarrow.parquet.write_table(table, file, row_group_size=250)


def start_server() -> str:
    """Starts moto's server in this process, for this one and the workers; returns an address there."""
    import fsspec
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # which logs each request
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "anybody",
        "AWS_SECRET_ACCESS_KEY": "anything",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    fsspec.filesystem("s3").mkdir("bucket")
    return "s3://bucket/digits"


def main(_: list[str]) -> None:
    """Trains as a worker; or writes the images, and starts the workers."""
    url = _URL.value or start_server()
    if cluster.detect() is not None:
        work(url)
        return
    write_images(url)
    launcher = [sys.executable, "-m", "tfdist.launch", "run", "--workers", "2", "--max-restarts", "2"]
    subprocess.run([*launcher, __file__, *sys.argv[1:], f"--url={url}"], check=True)


if __name__ == "__main__":
    app.run(main)
