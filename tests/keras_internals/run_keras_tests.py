"""Runs Keras' own tests of distribution with TensorFlow's MirroredStrategy replaced by tfdist's."""

import sys
from pathlib import Path

import keras
import pytest
import tensorflow as tf

from tfdist.strategies import MirroredStrategy

if __name__ == "__main__":
    tf.distribute.MirroredStrategy = MirroredStrategy
    folder = Path(keras.__file__).parent / "src" / "backend" / "tensorflow"
    names = ("distribute_test.py", "optimizer_distribute_test.py")
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *(str(folder / name) for name in names)]))
