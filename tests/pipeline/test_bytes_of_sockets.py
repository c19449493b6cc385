"""The bytes between processes are those that the strategy counts, and those of the formulas."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from child_environment import ROOT, child_environment

_LIMIT_SECONDS = 240
_LARGE = 100_000  # bytes a step; below, requests and headers count


@pytest.mark.multi_process
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [
        "MLP, 4 stages, global_clipnorm, EMA",
        "MLP, 2 stages, 2 columns, clipnorm, EMA",
        "transformer, 2 stages, 2 columns, global_clipnorm, EMA",
    ],
)
def test_counted_bytes_are_sent(case: str, tmp_path: Path) -> None:
    if shutil.which("ss") is None:
        pytest.skip("there is no ss (iproute2)")
    output = tmp_path / "links.json"
    script = ROOT / "benchmarks" / "stage_links.py"
    with open(tmp_path / "log.txt", "w") as log:
        process = subprocess.Popen(
            [sys.executable, str(script), "--output", str(output), "--case", case],
            env=child_environment(),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            process.wait(_LIMIT_SECONDS)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, 9)  # with its servers
                process.wait()
    assert process.returncode == 0, (tmp_path / "log.txt").read_text()[-3000:]
    (links,) = json.loads(output.read_text()).values()
    assert sum(link["formula"] for link in links) > 4e6
    for link in links:
        assert link["counted"] == link["formula"], link
        if link["formula"] >= _LARGE:
            assert 1 <= link["sent"] / (link["formula"] + link["end_of_fit"]) <= 1.05, link
    chief = [link for link in links if "chief" in link["link"]]
    assert sum(link["sent"] - link["formula"] for link in chief) <= 100_000
