"""A small training that fails if a newer TensorFlow or Keras behaves otherwise than tfdist assumes.

A missing private symbol of a module or a class is an error anyway (`tfdist.private_symbols`). This also looks up the
private attributes of instances, and finds what exists, but is used in another way: optimizers that count updates
elsewhere, steps that are numbered otherwise, losses that bypass a replaced function, gradients that are reduced twice.
"""

import functools
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.keras_internals import keras_attributes
from tfdist.keras_internals.epoch_iterator import last_step
from tfdist.private_symbols import MissingPrivateSymbolError, check_attributes
from tfdist.tensorflow_internals import tensorflow_attributes
from tfdist.versions import UntestedVersionWarning, check_versions, installed_versions

_TIMEOUT_SECONDS = 300.0
_PROGRAM = "from tfdist.strategies.version_canaries import main; main()"
_MISSING_SYMBOL = 3  # the exit status of the child if an attribute is missing
_TABLES = (keras_attributes, tensorflow_attributes)  # which record what `check_attributes` looks up
_is_canary = False


class IncompatibleVersionError(RuntimeError):
    """tfdist trains wrongly with the installed version of TensorFlow or Keras."""


def check_installed_versions(*, is_chief: bool) -> None:
    """Warns of an untested version of TensorFlow or Keras, and runs the canaries with it in a child process.

    Only the chief runs them: the workers of a cluster have the same versions.

    Raises:
        UnsupportedVersionError: If TensorFlow or Keras is too old.
        MissingPrivateSymbolError: If objects of TensorFlow or Keras have lost a private attribute.
        IncompatibleVersionError: If a canary fails.
    """
    if not _is_canary:
        _check_once(is_chief)


@functools.cache
def _check_once(is_chief: bool) -> None:
    if not check_versions(stacklevel=5) or not is_chief:
        return
    # A child, because a training in this process would change its devices, random numbers and names of layers.
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    environment.pop("TF_CONFIG", None)
    root = str(Path(__file__).resolve().parents[1])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH")]))
    try:
        child = subprocess.run(
            [sys.executable, "-c", _PROGRAM],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        warnings.warn(f"tfdist could not check these versions: {error}.", UntestedVersionWarning, stacklevel=4)
        return
    if child.returncode == _MISSING_SYMBOL:
        raise MissingPrivateSymbolError(child.stdout.splitlines()[-1])
    if child.returncode:
        errors = "; ".join(child.stdout.splitlines()) or "; ".join(child.stderr.splitlines()[-1:]) or child.returncode
        versions = ", ".join(f"{name} {version}" for name, version in installed_versions().items())
        raise IncompatibleVersionError(
            f"tfdist does not train correctly with the installed versions. Received: {versions}, with which {errors}. "
            "Expected: versions of the tested ranges (`tfdist.versions.tested_ranges()`). Install these, or a newer "
            "tfdist."
        )


def canary_failures(devices: list[str]) -> list[str]:
    """Trains on two devices, given by name; returns what differs from the expectation."""
    from tfdist.strategies.mirrored_strategy import MirroredStrategy

    steps_of_batches: list[int] = []

    class Steps(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            steps_of_batches.append(last_step(self.model, batch))

    # The first replica has six valid entries in each batch, the second one two.
    values = np.arange(1, 9, dtype="float32").reshape(2, 4, 1)
    values[1, 2:] = 0
    values[0, 3:] = values[1, 3:] = 0
    inputs = np.concatenate([values] * 4)
    strategy = MirroredStrategy(devices)
    with strategy.scope():
        layers = [keras.Input((4, 1)), keras.layers.Masking(), keras.layers.Dense(1, kernel_initializer="ones")]
        model = keras.Sequential(layers)
        model.compile(keras.optimizers.SGD(0.0), loss=keras.losses.MeanSquaredError(), steps_per_execution=2)
    logs = model.fit(inputs, 0 * inputs, batch_size=2, shuffle=False, verbose=0, callbacks=[Steps()]).history
    valid = inputs[inputs != 0]
    expected = float(np.mean(np.square(valid)))
    stats, iterations = strategy.communication, int(model.optimizer.iterations.numpy())
    comparisons = {
        "optimizer.iterations": (iterations, 4),
        "the last steps that callbacks get": (steps_of_batches, [1, 3]),
        "the collectives of gradients in 4 updates": ((stats.gradient_collectives, stats.updates), (4, 4)),
    }
    failures = [
        f"{quantity} are {seen} instead of {wanted}"
        for quantity, (seen, wanted) in comparisons.items()
        if seen != wanted
    ]
    if not np.isclose(logs["loss"][0], expected, rtol=1e-5):
        failures.append(f"a masked loss is {logs['loss'][0]} instead of {expected}")
    return failures


def main() -> None:
    """Prints what differs, a line each, and exits with 1 if anything does; or the error of a missing attribute."""
    global _is_canary
    _is_canary = True
    physical = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(physical, [tf.config.LogicalDeviceConfiguration()] * 2)
    try:
        check_attributes()
    except MissingPrivateSymbolError as error:
        sys.stdout.write(f"{error}\n")
        sys.exit(_MISSING_SYMBOL)
    try:
        failures = canary_failures(["CPU:0", "CPU:1"])
    except Exception as error:  # whatever a library that has changed raises
        failures = [f"a training raises {type(error).__name__}: {' '.join(str(error).split())[:500]}"]
    sys.stdout.write("".join(f"{failure}\n" for failure in failures))
    sys.exit(bool(failures))
