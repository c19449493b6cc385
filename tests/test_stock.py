"""The README's table is true: stock Keras 3 still has every fault in it, and tfdist has none."""

import json
from importlib.metadata import version
from pathlib import Path

import pytest
from comparison import TOLERANCE
from rows import DIFFERS, ROWS, WAITS, describe, run_rows


@pytest.fixture(scope="module")
def results():
    """What every program of the table did, under both libraries."""
    return run_rows()


def names(row):
    return row.name


# Long: what stock Keras does changes with its version alone, and what tfdist does is among the cases of tests/parity.
@pytest.mark.long
@pytest.mark.multi_process
@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=names)
def test_tfdist_is_right(results, row):
    result = results[row.name]["tfdist"]
    if row.refusal:
        assert row.refusal in result.get("error", ""), f"tfdist did not refuse: {result}"
        return
    assert "difference" in result, result.get("traceback", result)
    assert result["difference"] <= TOLERANCE


@pytest.mark.long
@pytest.mark.multi_process
@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=names)
def test_stock_has_the_fault(results, row):
    result = results[row.name]["stock"]
    found = (
        f"Stock Keras {version('keras')} with TensorFlow {version('tensorflow')} no longer does what the README says "
        f"of {row.program!r}. Expected: {row.stock!r}. Received: {describe(row, 'stock', result)!r}. If it is right, "
        f"drop the row {row.name!r} from tests/stock/rows.py and from the README; else say there what it does."
    )
    if row.stock == WAITS:
        assert "waits" in result, found
    elif row.stock == DIFFERS:
        assert result.get("difference", 0.0) > 100 * TOLERANCE, found
    else:
        assert result.get("ended", 0) < 0 or row.stock in result.get("error", ""), found


def test_the_readme_shows_the_measured_table():
    root = Path(__file__).resolve().parents[1]
    measured = json.loads((root / "benchmarks" / "results" / "stock.json").read_text())["rows"]
    readme = (root / "README.md").read_text()
    lines = [f"| {row['program']} | {row['stock']} | {row['tfdist']} |" for row in measured]
    assert lines
    assert [line for line in lines if line not in readme] == []
