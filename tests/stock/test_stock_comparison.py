"""`docs/compared_with_stock.md` is true: stock Keras 3 still has every fault of its table, and tfdist has none."""

import json
from importlib.metadata import version
from pathlib import Path

import pytest
from comparison import TOLERANCE
from rows import DIFFERS, ROWS, WAITS, describe, run_rows


@pytest.fixture(scope="module")
def results():
    """The results of every program of the table under both libraries."""
    return run_rows()


def names(row):
    return row.name


# Long: the results of stock Keras change only with its version, and tests/parity covers those of tfdist.
@pytest.mark.long
@pytest.mark.multi_process
@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=names)
def test_tfdist_is_right(results, row):
    result = results[row.name]["tfdist"]
    if row.rejection:
        assert row.rejection in result.get("error", ""), f"tfdist did not reject it: {result}"
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
        f"Stock Keras {version('keras')} with TensorFlow {version('tensorflow')} no longer does what "
        f"docs/compared_with_stock.md says of {row.program!r}. Expected: {row.stock!r}. Received: "
        f"{describe(row, 'stock', result)!r}. If stock Keras is right now, remove the row {row.name!r} from "
        "tests/stock/rows.py and from the page; otherwise correct both."
    )
    if row.stock == WAITS:
        assert "waits" in result, found
    elif row.stock == DIFFERS:
        assert result.get("difference", 0.0) > 100 * TOLERANCE, found
    else:
        assert result.get("ended", 0) < 0 or row.stock in result.get("error", ""), found


def test_the_page_shows_the_measured_table():
    root = Path(__file__).resolve().parents[2]
    measured = json.loads((root / "benchmarks" / "results" / "stock.json").read_text())["rows"]
    page = (root / "docs" / "compared_with_stock.md").read_text()
    lines = [f"| {row['program']} | {row['stock']} | {row['tfdist']} |" for row in measured]
    assert lines
    assert [line for line in lines if line not in page] == []
    tables = page.split("**TensorFlow's own tests of strategies.**")
    assert tables[0].count("\n| ") == len(lines) + 1
