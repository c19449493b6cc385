"""The examples of Dask, each in a short run on a cluster of its own."""

import re

import pytest
from child_environment import ROOT, run_python
from optional_packages import require

require("distributed", "sklearn")

pytestmark = [pytest.mark.multi_process, pytest.mark.long]

EXAMPLES = ROOT / "examples" / "engines"


def test_digits():
    output = run_python(str(EXAMPLES / "digits_on_dask.py"), "--epochs=3").stdout
    last = re.search(
        r"^digits: 2 workers on Dask ([\d.]+) %, one process ([\d.]+) % held-out accuracy; "
        r"largest weight difference (\S+)$",
        output,
        re.MULTILINE,
    )
    assert last, output
    workers, one_process, difference = map(float, last.groups())
    assert workers == one_process > 80 and difference < 1e-4


def test_grid_search():
    output = run_python(str(EXAMPLES / "grid_search_on_dask.py"), "--epochs=2", "--fits=2").stdout
    assert len(re.findall(r"^\{.*\}: accuracy ([\d.]+) % on Dask, \1 % in one process$", output, re.MULTILINE)) == 4
    last = re.search(r"^largest difference of a score: (\S+)$", output, re.MULTILINE)
    # In float32 the order of sums changes a gradient by 1e-7 of its size, so 30 steps of Adam(1e-2) change a weight by
    # 3e-8, and a logit, a sum of 128 products with inputs of at most 1, by 4e-6; a log loss by twice as much. An image
    # that is classified differently would change the accuracy by 1e-3.
    assert last and float(last[1]) < 1e-5, output
