"""The converted Horovod program trains on two workers, and the page shows what it does."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tensorflow_datasets", reason="needs the extra `examples`")

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "migrating" / "horovod_after.py"
PAGE = ROOT / "docs" / "migrating_from_horovod.md"
RUN_LIMIT_SECONDS = 150


@pytest.mark.multi_process
def test_converted_program_trains_evaluates_and_saves(tmp_path: Path) -> None:
    script = [str(SCRIPT), "--epochs=3", f"--data_dir={tmp_path / 'data'}", f"--directory={tmp_path}"]
    done = subprocess.run(
        [sys.executable, "-m", "tfdist.launch", "run", "--workers", "2", *script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=RUN_LIMIT_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = re.search(r"^\[0\] 2 workers: held-out loss ([\d.]+), accuracy ([\d.]+) %$", done.stdout, re.MULTILINE)
    assert said and float(said[2]) > 70, done.stdout
    assert "[1] 2 workers" not in done.stdout
    assert (tmp_path / "model.keras").is_file()
    assert len(list((tmp_path / "checkpoints").glob("ckpt-*"))) == 3


def test_page_shows_the_program() -> None:
    after = PAGE.read_text(encoding="utf-8").split("After,")[1].split("```")[1].removeprefix("python\n")
    script = re.sub(r"\s", "", SCRIPT.read_text(encoding="utf-8"))
    script = script.replace("_PASSES", "2").replace("_BATCH_SIZE.value", "64").replace("_EPOCHS.value", "4")
    lines = [re.sub(r"\s|#.*", "", line) for line in after.splitlines()]
    shown = [line for line in lines if len(line) > 1]
    assert len(shown) > 10
    assert [line for line in shown if line not in script and "checkpoints" not in line and "save" not in line] == []
