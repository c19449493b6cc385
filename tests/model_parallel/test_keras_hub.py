"""Backbones of KerasHub with the automatic layout: two columns of two stages, each shared by two devices."""

import importlib.util
import json
from pathlib import Path

import pytest
from child_environment import run_python

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("keras_hub") is None, reason="needs keras-hub"),
]
SCRIPT = Path(__file__).parent / "hub_in_stages.py"


@pytest.mark.parametrize(
    ("name", "split", "sums"), [("gpt2", 21, 4), ("bert", 25, 4), ("llama", 15, 4), ("mistral", 16, 4), ("gemma", 7, 2)]
)
def test_weights_equal_those_of_one_process(name: str, split: int, sums: int, tmp_path: Path) -> None:
    """After 20 steps of Adam; no layer gathers variables or values, and each block has four sums, that of Gemma two."""
    results = tmp_path / "results.json"
    hub = Path(importlib.util.find_spec("keras_hub").origin).parents[1]  # type: ignore[union-attr, arg-type]
    run_python(SCRIPT, name, results, paths=(SCRIPT.parent, hub), limit_seconds=280)
    found = json.loads(results.read_text())
    assert found["steps"] == 20 and found["split"] == split
    assert found["weights"] <= 1e-5 and found["logs"] <= 1e-5
    rows = [line.split() for line in found["summary"] if " split " in line and line.endswith("B")]
    assert len(rows) >= 3 and all(row[4:] == ["0", "B", "0", "B"] for row in rows)
    blocks = [row[2] for row in rows if "transformer_layer" in row[0] or "decoder_block" in row[0]]
    assert blocks == [str(sums * 16 * 4)] * 2  # of a position, as the lengths of sequences are not static
