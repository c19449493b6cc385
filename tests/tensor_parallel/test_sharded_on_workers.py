"""Variables split over the devices of several processes."""

from pathlib import Path

import pytest
from launched_runs import launch_once

pytestmark = [pytest.mark.multi_process, pytest.mark.long]
FOLDER = Path(__file__).parent
PATHS = [FOLDER, FOLDER.parent / "pipeline"]


def test_stages_of_two_workers_each(tmp_path_factory: pytest.TempPathFactory) -> None:
    options = ["--chief", "--workers", "4"]
    script = FOLDER / "sharded_on_workers.py"
    run = launch_once(tmp_path_factory, "sharded on workers", script, options=options, paths=PATHS)
    results = run.assert_complete().json("results.json")
    tasks = [[device.partition("/task:")[2][0] for device in column] for column in results["columns"]]
    assert tasks == [["0", "2"], ["1", "3"]]
    assert results["weights"] <= 1e-5 and results["slots"] <= 1e-5 and results["logs"] <= 1e-5
    assert results["loaded"] == 0.0
