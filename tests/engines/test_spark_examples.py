"""The examples of Spark, each in a session of its driver."""

import os
import re
import sys

import pytest
from child_environment import run_python
from local_spark import require_spark

require_spark()
pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def python_of_executors(monkeypatch):
    monkeypatch.setitem(os.environ, "PYSPARK_PYTHON", sys.executable)


def test_two_workers_train_as_one_process(tmp_path):
    options = "--master", "local[2]", "--epochs", "2", "--directory", str(tmp_path)
    shown = run_python("examples/engines/digits_on_spark.py", *options).stdout
    difference = re.search(r"2 workers on Spark; largest weight difference to one process (\S+)", shown)
    assert difference and float(difference[1]) < 1e-5, shown
    assert not list((tmp_path / "data").iterdir())


def test_a_pipeline_is_searched_and_saved(tmp_path):
    options = "--workers", "1", "--epochs", "4", "--directory", str(tmp_path)
    shown = run_python("examples/engines/pipeline_on_spark.py", *options).stdout
    found = re.search(r"([\d.]+) % with 2 units, ([\d.]+) % with 64 .*; ([\d.]+) % of the held-out", shown)
    assert found and float(found[1]) < float(found[2]) and float(found[3]) > 85, shown
    assert not list((tmp_path / "store").iterdir()) and (tmp_path / "pipeline" / "metadata").is_dir()
