"""The program of two workers in `test_local_updates_on_workers.py`: each writes its observations to a folder.

Its arguments are the folder and the number of devices of each worker.
"""

import contextlib
import json
import shutil
import sys
from pathlib import Path

import keras
import local_models
import numpy as np
import tensorflow as tf
from local_models import compiled, fit, weights

from tfdist.callbacks import CommunicationReport, FailureRecovery
from tfdist.compression import Policy
from tfdist.strategies import DiLoCo, LocalSGD, MultiWorkerMirroredStrategy, Synchronous


def sgd():
    return keras.optimizers.SGD(0.05)


def adam():
    return keras.optimizers.Adam(0.02)


def everything():
    inner = keras.optimizers.AdamW(0.02, clipnorm=0.5, use_ema=True, ema_momentum=0.9, gradient_accumulation_steps=2)
    return keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**127)


def outer_sgd():
    return keras.optimizers.SGD(1.0)


class Stop(keras.callbacks.Callback):
    """Ends `fit` by an error after the sixth step, in the second epoch."""

    def on_train_batch_end(self, batch, logs=None):
        if int(self.model.optimizer.iterations.numpy()) == 6:
            raise InterruptedError


def synchronous(strategy, seen, save):
    """Exchanges after each update with plain SGD, also with an uneven last batch, and sums in a custom loop."""
    for name, mode in (
        ("sync", Synchronous()),
        ("local 1", LocalSGD(sync_every=1)),
        ("diloco 1", DiLoCo(sync_every=1, outer_optimizer=outer_sgd)),
    ):
        other = MultiWorkerMirroredStrategy(mode=mode)
        model = compiled(other, sgd)
        # Each worker has 19 or 18 samples: batches of 6, 6, 6 and 1 or 0.
        seen[name] = fit(model, samples=37).history
        save(f"{name}", model)
        seen[f"{name} evaluated"] = model.evaluate(local_models.INPUTS, local_models.TARGETS, verbose=0)
        if name != "diloco 1":
            save(f"{name} loop", custom_loop(other))


def custom_loop(strategy):
    model = compiled(strategy, sgd, normalizes=True)
    data = tf.data.Dataset.from_tensor_slices((local_models.INPUTS, local_models.TARGETS)).batch(local_models.BATCH)

    def replica_step(inputs, targets):
        with tf.GradientTape() as tape:
            losses = tf.reduce_sum((model(inputs, training=True) - targets) ** 2, axis=1)
            loss = tf.nn.compute_average_loss(losses, global_batch_size=local_models.BATCH)
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply(gradients, model.trainable_variables)

    @tf.function
    def step(batch):
        strategy.run(replica_step, args=batch)

    for batch in strategy.experimental_distribute_dataset(data):
        step(batch)
    strategy.synchronize(model)
    return model


def messages(seen):
    """Counts what a worker sends in epochs of four and of forty steps without an exchange between them."""
    strategy = MultiWorkerMirroredStrategy(mode=LocalSGD(sync_every=1000))
    model = compiled(strategy, adam, normalizes=True)
    rows = np.concatenate([local_models.INPUTS] * 10), np.concatenate([local_models.TARGETS] * 10)
    counts = []
    for number in (1, 10):
        data = tf.data.Dataset.from_tensor_slices(tuple(part[: 48 * number] for part in rows))
        data = data.batch(local_models.BATCH)
        model.fit(data, verbose=0)
        before = strategy.communication
        model.fit(data, verbose=0)
        after = strategy.communication - before
        counts.append([after.updates, after.other_collectives, after.gradient_collectives])
    seen["messages"] = counts
    seen["statistics"] = [float(np.sum(value)) for value in model.layers[1].get_weights()]


def resumed(folder, save):
    """Saves in the middle of an epoch, with an exchange under way, and resumes in new models."""

    def model():
        strategy = MultiWorkerMirroredStrategy(mode=local_models.MODE, compression=Policy("int8", dense_below=0))
        return compiled(strategy, adam)

    complete = model()
    fit(complete)
    save("complete", complete)
    # Not in the background: what is copied below must not be under way any more.
    recovery = FailureRecovery(folder / "checkpoints", every_steps=1, background=False)
    with contextlib.suppress(InterruptedError):
        fit(model(), callbacks=[recovery, Stop()])
    again = model()
    if again.distribute_strategy.rank == 0:
        shutil.copytree(folder / "checkpoints", folder / "interrupted")
    again.distribute_strategy.reduce("SUM", tf.ones([]), axis=None)  # waits for the copy
    fit(again, callbacks=[FailureRecovery(folder / "checkpoints", every_steps=1)])
    save("resumed", again)


def main(folder, devices):
    if int(devices) > 1:
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * int(devices))
    strategy = MultiWorkerMirroredStrategy()
    seen = {"rank": strategy.rank}

    def save(name, model):
        np.savez(folder / f"{name}-{strategy.rank}.npz", **weights(model))

    synchronous(strategy, seen, save)
    for name, mode, optimizer, more in (
        ("mean", LocalSGD(sync_every=3), adam, {}),
        ("compiled", LocalSGD(sync_every=3), adam, {"jit_compile": True}),
        ("fragments", DiLoCo(sync_every=3, fragments=2), adam, {}),
        ("overlap", DiLoCo(sync_every=3, fragments=2, overlap_steps=2), adam, {"steps_per_execution": 2}),
        ("everything", DiLoCo(sync_every=2, overlap_steps=1), everything, {}),
    ):
        other = MultiWorkerMirroredStrategy(mode=mode)
        model = compiled(other, optimizer, **more)
        report = CommunicationReport(print_table=False)
        seen[name] = fit(model, epochs=4 if name == "everything" else 2, callbacks=[report]).history
        save(name, model)
    messages(seen)
    resumed(folder, save)
    (folder / f"seen-{strategy.rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
