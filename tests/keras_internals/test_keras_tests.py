"""Keras' own tests of distribution pass with tfdist's MirroredStrategy in the place of TensorFlow's."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from child_environment import child_environment


@pytest.mark.long  # what they check in one process, tests/parity checks on two replicas by default
def test_keras_own_distribution_tests_pass():
    command = [sys.executable, str(Path(__file__).with_name("run_keras_tests.py"))]
    finished = subprocess.run(
        command, env=child_environment(), capture_output=True, text=True, timeout=900, check=False
    )
    assert finished.returncode == 0, finished.stdout[-4000:] + finished.stderr[-2000:]
    # Keras 3.15 has seventeen; one of them is skipped where tf_keras is not installed.
    passed = int(re.search(r"(\d+) passed", finished.stdout)[1])
    assert passed >= 16, finished.stdout[-2000:]
