"""The example of a custom loop that recovers, in a short run; it starts the launcher itself."""

import re

import pytest
from child_environment import ROOT, run_python


@pytest.mark.long
@pytest.mark.multi_process
def test_a_killed_loop_changes_no_weight() -> None:
    done = run_python(str(ROOT / "examples" / "custom_loop_recovery.py"), "--epochs=2")
    assert done.stdout.splitlines()[-1] == "custom loop: killed in step 20 of 40; weights bit-identical: True"
    assert "tfdist: worker 0 failed first: killed by SIGKILL" in done.stderr
    # The save after step 16 waits for that after step 8, and may not be complete itself.
    assert re.search(r"^\[0\] LoopRecovery: resuming in epoch 1, after step (8|16)$", done.stdout, re.MULTILINE)
