"""The program of the workers in `test_elastic_on_workers.py`: trainings during which workers are lost and join again.

python on_workers_elastic_fits.py FOLDER [NAME [LOCATION]]     a further one, on two devices a worker; its checkpoints
"""

import functools
import json
import os
import signal
import sys
import time
from pathlib import Path

# By training: the rank that is lost, the step after which it is, and the signal; without one its gradients are wrong.
FAULTS = {
    "chief_is_lost": [(0, 100, signal.SIGKILL)],
    "two_are_lost": [(1, 60, signal.SIGKILL), (2, 60, signal.SIGKILL)],
    "one_leaves": [(1, 90, signal.SIGTERM)],
    # Before a step with an exchange, which is computed again, and without; missing at the end of an epoch. Where all
    # trainings run, "diloco" is the last, and ends without the lost worker, which would take seconds to start.
    "diloco": [(0, 154, signal.SIGKILL)],
    "local_sgd": [(0, 38, signal.SIGKILL), (1, 114, signal.SIGKILL), (2, 157, signal.SIGTERM)],
    "local_compressed": [(1, 60, signal.SIGKILL), (0, 120, signal.SIGKILL)],
    "loop": [(0, 110, signal.SIGKILL)],
    "compiled": [(0, 60, signal.SIGKILL)],
    "eager": [(1, 60, signal.SIGKILL)],
    "from_python": [(2, 60, signal.SIGKILL)],
    "own_step": [(0, 60, signal.SIGKILL)],
    "compressed": [(1, 60, signal.SIGKILL)],
    "compressed_loop": [(1, 110, signal.SIGKILL)],
    "wrong_gradients": [(2, 60, None)],
    "rounded": [(1, 60, signal.SIGKILL)],
    "accumulated": [(0, 60, signal.SIGKILL)],
    "accumulated_eagerly": [(1, 60, signal.SIGKILL)],
    # Before an incomplete accumulation is applied, and within an accumulation.
    # While it writes the checkpoint of step 60.
    "on_a_store": [(0, 61, signal.SIGKILL)],
    "accumulated_by_a_callback": [(1, 80, signal.SIGKILL), (0, 164, signal.SIGKILL)],
}
# By training: the rank on which a bit of a weight changes, and the step after which it does.
FLIPS = {"chief_is_lost": (2, 30)}
TRACED_EARLY = ("two_are_lost", "compressed", "accumulated")  # by workers that join, before they have the state
_LONGEST_WAIT_SECONDS = 120.0
# By training: when `FailureRecovery` saves. In "recovered" rank 0 is lost before it commits the save after step 20, and
# the two others after step 33; in "on_a_store" all are, when rank 0 is back.
SAVES = {
    "recovered": {"every_steps": 4},
    "one_leaves": {"every_steps": 7, "every_seconds": 0.5},
    "preempted": {"every_epochs": 10},
    "local_sgd": {"every_steps": 3},
    "on_a_store": {"every_steps": 10},
}
_UNCOMMITTED, _ALL_END, _ALL_END_ON_A_STORE = 20, 33, 151


def main(folder, name=None, location=None):
    """Trains, is lost, and writes what it has computed."""
    import elastic_fits
    import keras
    import local_fits
    import numpy as np
    import tensorflow as tf

    from tfdist.callbacks import FailureRecovery
    from tfdist.checkpoint import open_store
    from tfdist.checkpoint.sharded_save import ShardedSave
    from tfdist.keras_internals import model_introspection
    from tfdist.strategies import MultiWorkerMirroredStrategy, replicated_hooks

    def saved(name, rank):
        """Writes what `FailureRecovery` will find, and returns it."""
        directory = location or folder / name / "checkpoints"
        store = open_store(directory)
        found = [store.open(info.sequence) for info in store.list_checkpoints() if info.status == "complete"]
        facts = [[checkpoint.metadata["step"], checkpoint.saved_ranks] for checkpoint in found]
        path = folder / f"{name}-{rank}-{os.environ['TFDIST_ATTEMPT']}.json"
        if not path.exists():  # by an earlier process
            path.write_text(json.dumps(facts))
        return FailureRecovery(directory, **SAVES[name])

    commit = ShardedSave._commit

    def commit_unless_lost(save, manifest):
        mark = folder / "recovered-0.lost"
        if save._directory.parent.name == "recovered" and manifest.metadata["step"] == _UNCOMMITTED:
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return commit(save, manifest)

    ShardedSave._commit = commit_unless_lost

    if name is not None:
        devices = [tf.config.LogicalDeviceConfiguration()] * 2
        tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], devices)

    class Faults(keras.callbacks.Callback):
        """Loses this worker once, and makes steps slow until all that were lost have joined."""

        def __init__(self, name, strategy, model):
            super().__init__()
            self._name, self._strategy, self._trained = name, strategy, model
            self._waits_until = time.monotonic() + _LONGEST_WAIT_SECONDS
            self._epoch = None

        def on_train_batch_end(self, batch, logs=None):
            if self._epoch is None:
                optimizer = self._trained.optimizer
                step = int(getattr(optimizer, "inner_optimizer", optimizer)._iterations.numpy())
            else:
                step = elastic_fits.STEPS * self._epoch + batch + 1
            strategy = self._strategy
            living = strategy.living_ranks
            is_complete = len(living) == strategy.num_workers
            flips, after = FLIPS.get(self._name, (None, 0))
            mark = folder / f"{self._name}.flipped"
            if flips == strategy.rank and step >= after and is_complete and not mark.exists():
                mark.touch()
                weight = self._trained.trainable_variables[0]
                bits = weight.numpy().view(np.uint32)
                bits[0, 0] ^= 1 << 6  # rounding removes smaller differences
                weight.assign(bits.view(np.float32))
            for rank, at, number in FAULTS.get(self._name, ()):
                mark = folder / f"{self._name}-{rank}.lost"
                if rank == strategy.rank and step >= at and is_complete and not mark.exists():
                    mark.touch()
                    if number is None:
                        elastic_fits.wrong_workers.add(rank)
                    else:
                        os.kill(os.getpid(), number)
            if self._name == "preempted" and not (folder / "leaves").exists():
                (folder / f"trains-{strategy.rank}").touch()
                time.sleep(0.1)
            elif self._name == "recovered":
                mark = folder / f"recovered-{strategy.rank}.lost"
                if len(living) == 2 and step >= _ALL_END and not mark.exists():
                    mark.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
            elif self._name == "on_a_store" and step >= _ALL_END_ON_A_STORE:
                others = [*folder.glob("on_a_store-?.ended")]
                mark = folder / f"on_a_store-{strategy.rank}.ended"
                if (is_complete or others) and not mark.exists():
                    mark.write_text(str(step))
                    os.kill(os.getpid(), signal.SIGKILL)
            elif living and not is_complete and self._name != last and time.monotonic() < self._waits_until:
                time.sleep(0.5 * self._trained.steps_per_execution)

    class FaultsOfEpochs(Faults):
        """Counts steps itself. With a callback that begins epochs, a worker that joins traces its step later."""

        def on_epoch_begin(self, epoch, logs=None):
            self._epoch = epoch

    trace, traced = model_introspection.trace_step, []

    def noted_trace(function, spec):
        trace(function, spec)
        traced.append(str(spec))

    replicated_hooks.trace_step = noted_trace
    elastic_fits.move_shares()
    fits, last = {**elastic_fits.FITS, "diloco": local_fits.diloco}, "diloco"
    if name is not None:
        fits, last = {name: getattr(elastic_fits, name, None) or getattr(local_fits, name)}, None
    options = elastic_fits.STRATEGY_OPTIONS | local_fits.STRATEGY_OPTIONS
    for name, fit in fits.items():
        print(f"training: {name}", flush=True)
        own = folder / name
        own.mkdir(exist_ok=True)
        strategy = MultiWorkerMirroredStrategy(**options.get(name, {}))
        if name != "recovered" and any(folder.glob(f"{name}-?.npz")):
            elastic_fits.skip(strategy)  # would be computed by this worker alone, which takes long
            continue
        faults = functools.partial(Faults if name in TRACED_EARLY else FaultsOfEpochs, name, strategy)
        traced.clear()
        recovery = [saved(name, strategy.rank)] if name in SAVES else []
        results = fit(strategy, own, lambda model, faults=faults, recovery=recovery: [faults(model), *recovery])
        if "load_balancing" in options.get(name, {}):
            results["shares"] = strategy.row_shares.state.numpy()
        if strategy.living_ranks:  # one that is started again computes earlier trainings by itself
            np.savez(folder / f"{name}-{strategy.rank}.npz", **results)
            (folder / f"{name}-{strategy.rank}.traced").write_text(json.dumps(traced))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
