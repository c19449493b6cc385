"""A search of KerasTuner whose trials train in loops, as `docs/recovery.md` shows; killed after some steps.

python tuner_search.py FOLDER STEPS     0: not killed; prints the scores and the steps of each trial
"""

import os
import signal
import sys
from pathlib import Path

import keras
import keras_tuner
import numpy as np
import tensorflow as tf

from tfdist.recovery import LoopRecovery


def main(folder: Path, killed_after: int) -> None:
    """Searches."""
    steps: list[tuple[str, int]] = []
    inputs = np.random.default_rng(0).normal(size=(12, 3)).astype("float32")

    def make_dataset() -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices((inputs, inputs[:, :1])).shuffle(12, seed=1).batch(4)

    def build(hyperparameters: keras_tuner.HyperParameters) -> keras.Model:
        units = hyperparameters.Int("units", 4, 6)
        keras.utils.set_random_seed(units)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(units, "tanh"), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.01), "mse")
        return model

    class Tuner(keras_tuner.RandomSearch):
        """Trains each trial in a loop."""

        def run_trial(self, trial, make_dataset, epochs):
            """Trains one trial, returns its loss."""
            model = self.hypermodel.build(trial.hyperparameters)
            dataset = make_dataset()
            directory = f"{self.project_dir}/recovery-{trial.trial_id}"
            with LoopRecovery(directory, model=model, every_steps=1, background=False, verbose=False) as recovery:
                for _ in recovery.epochs(epochs):
                    for step, (x, y) in recovery.steps(dataset):
                        model.train_on_batch(x, y)
                        steps.append((trial.trial_id, step))
                        if len(steps) == killed_after:
                            os.kill(os.getpid(), signal.SIGKILL)
            return model.evaluate(dataset, return_dict=True, verbose=0)["loss"]

    objective = keras_tuner.Objective("default_objective", "min")
    tuner = Tuner(build, objective=objective, max_trials=3, directory=folder, project_name="search", seed=1)
    tuner.search(make_dataset, 2)
    trials = sorted(tuner.oracle.trials.values(), key=lambda trial: trial.trial_id)
    print("scores", [float(trial.score) for trial in trials])
    print("steps", [[step for number, step in steps if number == trial.trial_id] for trial in trials])


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
