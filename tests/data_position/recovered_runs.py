"""Trainings with FailureRecovery that are interrupted and started again in one process, like two programs."""

import gc
import random

import keras
import numpy as np
import tensorflow as tf
from data_runs import BATCH, IDS, SEED, model_for

from tfdist.callbacks import FailureRecovery

EPOCHS = 2
STEPS = -(-len(IDS) // BATCH)


class Steps(keras.callbacks.Callback):
    """Records what each step saw, and fails after a number of steps."""

    is_stateless = True

    def __init__(self, fail_after):
        super().__init__()
        self.seen, self._fail_after = [], fail_after

    def on_train_begin(self, logs=None):
        self.model.seen.clear()

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(sorted(number for ids in self.model.seen.values() for number in ids))
        self.model.seen.clear()
        if len(self.seen) == self._fail_after:
            raise InterruptedError


class Drawing(keras.callbacks.Callback):
    """Draws from the global generators before each step."""

    is_stateless = True

    def __init__(self):
        super().__init__()
        self.drawn = []

    def on_train_batch_begin(self, batch, logs=None):
        self.drawn.append((np.random.random(), random.random()))


def run(make, folder, fail_after=None, *, seed=SEED, saves=None, callbacks=(), **arguments):
    """Returns what each step saw in a program that trains on `make()` and saves to `folder`, every step by default.

    It ends after step `fail_after`, before that is saved. Without a `seed` every run draws other random numbers.
    """
    keras.utils.set_random_seed(SEED if seed is None else seed)
    if seed is None:
        np.random.seed()
        random.seed()
    seen = _fit(make, folder, Steps(fail_after), saves or {"every_steps": 1}, callbacks, arguments)
    gc.collect()  # ends the thread that reads ahead, which must draw no more numbers
    return seen


def _fit(make, folder, steps, saves, callbacks, arguments):
    """Trains in a frame that holds the only references to the iterator."""
    model = model_for(tf.distribute.get_strategy())
    recovery = FailureRecovery(folder, **saves, background=False, handle_signals=False)
    given = {"epochs": EPOCHS, "verbose": 0, "shuffle": False, **arguments}
    try:
        model.fit(make(), callbacks=[*callbacks, recovery, steps], **given)
    except InterruptedError:
        pass
    for callback in callbacks:
        callback.set_model(None)
    return steps.seen


def cut_off(make, folder, after, make_again=None, **arguments):
    """Returns what the steps saw in a run that is interrupted after `after` saved steps, and in the resumed run."""
    begun = run(make, folder, after + 1, **arguments)
    return begun[:after] + run(make_again or make, folder, **arguments)


def cut_off_anywhere(make, folder, make_again=None):
    """Returns `cut_off` after the last step of an epoch, at its end, and in the next epoch, by name."""
    moments = {"last step": STEPS, "end of epoch": STEPS, "next epoch": STEPS + 2}
    return {  # saves no more often than required
        where: cut_off(
            make,
            folder / where,
            after,
            make_again,
            saves={"every_epochs": 1} if "end" in where else {"every_steps": after},
        )
        for where, after in moments.items()
    }


def each_once(seen):
    """Whether every epoch saw every sample once, regardless of the noise."""
    epochs = [seen[first : first + STEPS] for first in range(0, len(seen), STEPS)]
    ids = [sorted(number % 100 for step in epoch for number in step) for epoch in epochs]
    return ids == [IDS.tolist()] * EPOCHS
