"""The example of elastic training; it starts the launcher itself."""

import pytest
from child_environment import ROOT, run_python
from optional_packages import require

require("sklearn", "tensorflow_datasets")

pytestmark = [pytest.mark.long, pytest.mark.multi_process]  # `make demo` runs it, too


def test_elastic_example(tmp_path):
    arguments = ["--epochs=12", "--pause_seconds=0.06", f"--data_dir={tmp_path}"]
    done = run_python(str(ROOT / "examples" / "elastic.py"), *arguments)
    assert "1 worker lost, 1 joined" in done.stderr
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith("elastic: the chief was killed in epoch 3 of 12; 3 workers at the end;"), last
