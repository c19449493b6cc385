"""The example of recovery, in a short run; it starts the launcher itself."""

import re
from pathlib import Path

import pytest
from child_environment import ROOT, run_python
from optional_packages import require

require("sklearn", "tensorflow_datasets")


@pytest.mark.long  # `make demo` runs it, too
@pytest.mark.multi_process
def test_a_killed_worker_changes_no_weight(tmp_path: Path) -> None:
    done = run_python(str(ROOT / "examples" / "recovery.py"), "--epochs=1", f"--data_dir={tmp_path}")
    last = "recovery: a worker was killed after step 11 of 23; weights bit-identical: True"
    assert done.stdout.splitlines()[-1] == last
    assert len(re.findall(r"^tfdist: worker 1 failed first: killed by SIGKILL", done.stderr, re.MULTILINE)) == 1
    assert "[0] FailureRecovery: resuming in epoch 1 of 1, after step 10" in done.stdout
