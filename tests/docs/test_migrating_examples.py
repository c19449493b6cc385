"""The page on Horovod shows the converted program, which `tests/test_packaging.py` runs."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "migrating" / "horovod_after.py"
PAGE = ROOT / "docs" / "migrating_from_horovod.md"


def test_page_shows_the_program() -> None:
    after = PAGE.read_text(encoding="utf-8").split("After,")[1].split("```")[1].removeprefix("python\n")
    script = re.sub(r"\s", "", SCRIPT.read_text(encoding="utf-8"))
    script = script.replace("_PASSES", "2").replace("_BATCH_SIZE.value", "64").replace("_EPOCHS.value", "4")
    lines = [re.sub(r"\s|#.*", "", line) for line in after.splitlines()]
    shown = [line for line in lines if len(line) > 1]
    assert len(shown) > 10
    assert [line for line in shown if line not in script and "checkpoints" not in line and "save" not in line] == []
