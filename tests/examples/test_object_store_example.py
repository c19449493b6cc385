"""The example of an object store, in a short run; it starts a server and the launcher itself."""

import re

import pytest
from child_environment import ROOT, run_python
from optional_packages import require

require("moto", "flask", "pyarrow", "s3fs", "sklearn", "tensorflow_datasets")


@pytest.mark.long
@pytest.mark.multi_process
def test_a_killed_training_resumes_from_the_store() -> None:
    done = run_python(str(ROOT / "examples" / "object_store.py"), "--epochs=2", "--every_steps=5")
    assert "tfdist: worker 1 failed first: killed by SIGKILL" in done.stderr
    assert re.search(r"^\[0\] FailureRecovery: resuming in epoch [12] of 2, after step \d+$", done.stdout, re.MULTILINE)
    last = re.search(r"^\[0\] object store: ([\d.]+) % of the images in the last epoch$", done.stdout, re.MULTILINE)
    assert last and float(last[1]) > 60, done.stdout
