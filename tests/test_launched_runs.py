"""The run that several tests share: whoever uses one that was killed learns of it, and sees its output."""

import subprocess

import pytest
from launched_runs import launch_once


def test_a_run_that_takes_too_long_fails_in_every_test_process(tmp_path_factory, tmp_path):
    script = tmp_path / "hangs.py"
    script.write_text("import time; time.sleep(600)")

    def launch():
        return launch_once(tmp_path_factory, "a hanging script", script, options=["--workers", "1"], limit_seconds=1.0)

    with pytest.raises(subprocess.TimeoutExpired):
        launch()
    found = launch()
    with pytest.raises(AssertionError, match="none: the run was killed"):
        found.assert_complete()
    with pytest.raises(AssertionError, match=r"has not written results\.json"):
        found.json("results.json")
