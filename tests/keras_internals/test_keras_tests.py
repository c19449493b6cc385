"""Keras' own tests of distribution pass with tfdist's MirroredStrategy in the place of TensorFlow's."""

import re
from pathlib import Path

import pytest
from child_environment import run_python


@pytest.mark.long  # what they check in one process, tests/parity checks on two replicas by default
def test_keras_own_distribution_tests_pass():
    finished = run_python(Path(__file__).with_name("run_keras_tests.py"))
    # Keras 3.15 has seventeen; one of them is skipped where tf_keras is not installed.
    passed = int(re.search(r"(\d+) passed", finished.stdout)[1])
    assert passed >= 16, finished.stdout[-2000:]
