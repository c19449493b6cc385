"""The example of KerasTuner: two workers search in one directory, continue, and begin again."""

import re

import pytest
from example_runs import run_example
from optional_packages import require

require("keras_tuner", "sklearn", "tensorflow_datasets")
pytestmark = [pytest.mark.multi_process, pytest.mark.long]


def test_workers_agree_on_each_trial_and_search_on(tmp_path):
    def search(*arguments):
        common = ["--directory", str(tmp_path / "tuning"), "--data_dir", str(tmp_path / "data"), "--epochs", "1"]
        output = run_example("tuner.py", *common, *arguments)
        results = re.findall(r"worker \d: (\d+) trials, best (.*), accuracy (.*)", output)
        assert len(results) == 2 and results[0] == results[1], output
        return results[0]

    first = search("--trials", "2")
    assert first[0] == "2"
    assert search("--trials", "3")[0] == "3"
    assert search("--trials", "2", "--overwrite") == first
