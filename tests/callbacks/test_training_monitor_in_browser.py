"""Two workers, one of which is killed: curves, log, and TensorBoard in a browser."""

import re
from pathlib import Path

import pytest
from child_environment import run_python

from benchmarks.browser import browser_page, find_browser
from benchmarks.tensorboard_page import open_charts, serving, shown_tags

pytestmark = [pytest.mark.long, pytest.mark.multi_process, pytest.mark.slow, pytest.mark.usefixtures("cpus")]

ROOT = Path(__file__).resolve().parents[2]
LIMIT_SECONDS = 300
EPOCH_STEPS = 23
STEPS = 2 * EPOCH_STEPS
OURS = {
    f"tfdist/{name}"
    for name in (
        "wire_bytes dense_bytes compression_ratio residual_norm step_ms encode_ms exchange_ms decode_ms "
        "checkpoint_stall_ms restarts world_size replicas"
    ).split()
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def server(directory):
    if find_browser() is None:
        yield None
        return
    with serving(directory / "logs") as server:  # starts while the workers train
        yield server


@pytest.fixture(scope="module")
def printed(directory, server):
    """Trains; returns the lines of both streams."""
    options = ["--epochs=2", "--every_steps=5", "--save_every_steps=10", "--kill_at_steps=42"]
    script = [ROOT / "examples" / "monitoring.py", f"--directory={directory}", f"--data_dir={directory}", *options]
    launcher = ["-m", "tfdist.launch", "run", "--workers", "2", "--max-restarts", "1"]
    ended = run_python(*launcher, *script, limit_seconds=LIMIT_SECONDS)
    return ended.stdout.splitlines(), ended.stderr.splitlines()


def test_curves_continue_across_the_restart(printed, directory, curves):
    found = curves(directory / "logs" / "tfdist")
    assert set(found) == OURS
    points = [*range(5, STEPS, 5), STEPS]
    assert [step for step, _ in found["tfdist/world_size"]] == points, "each step once, though some ran twice"
    resumed_at = re.search(r"resuming in epoch 2 of 2, after step (\d+)", "\n".join(printed[0]))
    assert found["tfdist/restarts"] == [(step, float(step > int(resumed_at[1]))) for step in points]
    assert {value for _, value in found["tfdist/world_size"]} == {2.0}
    assert len({value for _, value in found["tfdist/wire_bytes"]}) == 1
    assert min(value for _, value in found["tfdist/compression_ratio"]) > 10
    assert len(list((directory / "logs" / "tfdist").iterdir())) == 2, "a file per start of the chief"


def test_one_progress_bar_shows_the_bytes_sent(printed):
    lines = [line for line in printed[0] if " - loss: " in line]
    assert len(lines) == 2
    for line in lines:
        assert re.match(r"\[0\] 23/23 - .* - loss: \d.* - sent: \d+\.\d kB/step", line), line


def test_log_reports_starts_and_checkpoints(printed):
    said = [line.removeprefix("tfdist: ") for line in printed[1] if line.startswith("tfdist: ")]
    begun, goes_on = (line for line in said if line.startswith("training"))
    assert begun == "training begins with 2 workers"
    assert re.fullmatch(r"training resumes after step (30|40) with 2 workers \(restart 1\)", goes_on)
    saved = [int(line.rpartition(" ")[2]) for line in said if line.startswith("checkpoint saved at step ")]
    assert saved == sorted(set(saved)) and saved[-1] == STEPS
    assert not any("\r" in line or "\x1b[K" in line for line in printed[1])


@pytest.mark.skipif(find_browser() is None, reason="no Chromium or Chrome on the PATH: apt-get install chromium")
def test_a_browser_shows_the_charts(printed, server):
    server.wait_for({*OURS, "epoch_loss"})
    with browser_page(find_browser(), width=1500, height=2400) as page:
        open_charts(page, server.address(), "tfdist/")
        assert set(shown_tags(page)) == OURS
        open_charts(page, server.address(), "epoch_loss")
        assert "epoch_loss" in shown_tags(page)
        runs = page.locator("runs-data-table, tb-data-table").first.inner_text().split()
        assert {"tfdist", "train", "validation"} <= set(runs)
