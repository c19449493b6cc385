"""A private symbol that is missing is named, with the reason and the remedy."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tfdist.private_symbols import MissingPrivateSymbolError, private, used_symbols

_ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("path", ["json:gone", "json:JSONDecoder.gone", "json.gone:anything"])
def test_a_missing_symbol_is_named(path):
    with pytest.raises(MissingPrivateSymbolError, match=rf"needs '{path}' \(to try\).*Received: .*Expected: a json"):
        private(path, why="to try")


def test_what_is_used_is_recorded_once():
    private("json:dumps", why="first")
    private("json:dumps", why="again")
    assert [symbol.why for symbol in used_symbols() if symbol.path == "json:dumps"] == ["again"]


@pytest.mark.parametrize(
    ("missing", "named"),
    [
        (
            "from tensorflow.python.distribute.mirrored_strategy import MirroredExtended\n"
            "del MirroredExtended._make_collective_ops_with_fallbacks",
            "tensorflow.python.distribute.mirrored_strategy:MirroredExtended._make_collective_ops_with_fallbacks",
        ),
        pytest.param(
            "import keras.src.losses.loss as m; del m.reduce_weighted_values",
            "keras.src.losses.loss:reduce_weighted_values",
            marks=pytest.mark.long,
        ),
    ],
)
def test_importing_the_strategies_names_what_a_library_has_lost(missing, named):
    script = f"{missing}\nimport tfdist.strategies"
    environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
    finished = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert finished.returncode != 0
    assert "MissingPrivateSymbolError" in finished.stderr
    assert named in finished.stderr


def test_architecture_page_lists_every_private_symbol():
    """The page is made by hand; this keeps it whole."""
    script = (
        "import tfdist.strategies\nfrom tfdist.private_symbols import used_symbols\n"
        "print('\\n'.join(symbol.path for symbol in used_symbols()))"
    )
    environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
    listed = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120, check=True
    ).stdout.split()
    page = (_ROOT / "docs" / "architecture.md").read_text()
    missing = [path for path in listed if path.partition(":")[2] not in page]
    assert listed
    assert not missing
