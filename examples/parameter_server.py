"""Trains the network of `digits.py` with parameter servers, which hold the variables while workers compute.

    tfdist run --workers 2 --parameter-servers 1 examples/parameter_server.py
    tfdist run --workers 2 --parameter-servers 1 examples/parameter_server.py --mode synchronous

The chief runs this script. By default each worker pushes its gradients as soon as it has computed them. With
`--mode synchronous` both workers compute parts of one batch, and the update equals that of one process on the batch.
"""

import keras
from absl import app, flags, logging
from digits import batches, build_model
from digits_dataset import load

from tfdist.callbacks import WorkerReport
from tfdist.strategies import Asynchronous, ParameterServerStrategy, Synchronous

_MODE = flags.DEFINE_enum(
    "mode", "asynchronous", ["asynchronous", "synchronous"], "How the workers' updates are combined."
)
_MAX_STALENESS = flags.DEFINE_integer(
    "max_staleness", None, "Largest staleness of asynchronous pushes. Default: no bound.", lower_bound=0
)
_BACKUP_WORKERS = flags.DEFINE_integer("backup_workers", 0, "How many workers a synchronous round does not wait for.")
_COMPRESSION = flags.DEFINE_string(
    "compression", None, 'How gradients are encoded, such as "int8". Default: uncompressed.'
)
_PULL_DTYPE = flags.DEFINE_enum(
    "pull_dtype", None, ["bfloat16", "float16"], "Dtype in which workers receive variables. Default: unchanged."
)


class Progress(keras.callbacks.Callback):
    """Prints a line for each epoch."""

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Prints the loss."""
        print(f"epoch {epoch + 1}: loss {(logs or {}).get('loss', 0):.4f}", flush=True)


def main(_: list[str]) -> None:
    """Trains on the cluster; prints the workers' statistics and the accuracy."""
    logging.set_verbosity(logging.WARNING)
    asynchronous = _MODE.value == "asynchronous"
    strategy = ParameterServerStrategy(
        mode=Asynchronous(_MAX_STALENESS.value) if asynchronous else Synchronous(_BACKUP_WORKERS.value),
        compression=_COMPRESSION.value,
        pull_dtype=_PULL_DTYPE.value,
    )
    images, held_out = load(flags.FLAGS.dataset, flags.FLAGS.data_dir)
    keras.utils.set_random_seed(flags.FLAGS.seed)
    with strategy.scope():
        model = build_model(tuple(images.element_spec[0].shape))
    model.fit(
        batches(images, shuffle=True),
        epochs=flags.FLAGS.epochs,
        shuffle=False,
        verbose=0,
        callbacks=[Progress(), WorkerReport()],
    )
    _, accuracy = model.evaluate(batches(held_out), verbose=0)
    print(f"{flags.FLAGS.dataset}, {_MODE.value}: {accuracy:.1%} held-out accuracy".replace("%", " %"))


if __name__ == "__main__":
    app.run(main)
