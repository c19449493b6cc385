"""The converted Horovod program trains on two workers, and the page shows what it does."""

import re
from pathlib import Path

import pytest
from example_runs import ROOT, run_example

pytest.importorskip("tensorflow_datasets", reason="needs the extra `examples`")

SCRIPT = ROOT / "examples" / "migrating" / "horovod_after.py"
PAGE = ROOT / "docs" / "migrating_from_horovod.md"


@pytest.mark.multi_process
def test_converted_program_trains_evaluates_and_saves(tmp_path: Path) -> None:
    arguments = "--epochs=3", f"--data_dir={tmp_path / 'data'}", f"--directory={tmp_path}"
    output = run_example("migrating/horovod_after.py", *arguments, cwd=tmp_path)
    said = re.search(r"^\[0\] 2 workers: held-out loss ([\d.]+), accuracy ([\d.]+) %$", output, re.MULTILINE)
    assert said and float(said[2]) > 70, output
    assert "[1] 2 workers" not in output
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
