"""What all tests share: a quiet TensorFlow, in this process and in those it starts."""

import gc
import os
import sys
from collections.abc import Iterator

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


@pytest.fixture(scope="module", autouse=True)
def small_heap() -> None:
    """Has the garbage collector leave aside what earlier modules have left: TensorFlow, its functions, finished tests.

    It would go through all of that each time it collects, which a test of ours asks for after every training: a second
    at the end of the suite.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_late_signal() -> Iterator[None]:
    """Has a signal that came too late to end the `fit` of a test not end that of the next one."""
    yield
    if preemption := sys.modules.get("tfdist.recovery.preemption"):
        preemption.Preemption._owed_since = None


@pytest.fixture(scope="session")
def cpus() -> list[str]:
    """Four logical CPU devices. Every test that uses TensorFlow in this process asks for them, before it starts."""
    import tensorflow as tf
    import without_autotuning

    without_autotuning.install()
    physical = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(physical, [tf.config.LogicalDeviceConfiguration()] * 4)
    return [f"CPU:{index}" for index in range(len(tf.config.list_logical_devices("CPU")))]
