"""The example of Ray, in a short run on a Ray of its own."""

import re

import pytest
from child_environment import ROOT, run_python
from optional_packages import require

require("ray", "sklearn")

pytestmark = [pytest.mark.multi_process, pytest.mark.long]


def test_digits():
    output = run_python(str(ROOT / "examples" / "engines" / "digits_on_ray.py"), "--epochs=3").stdout
    last = re.search(
        r"^digits: 2 workers on Ray ([\d.]+) %, one process ([\d.]+) % held-out accuracy; "
        r"largest weight difference (\S+)$",
        output,
        re.MULTILINE,
    )
    assert last, output
    workers, one_process, difference = map(float, last.groups())
    assert workers == one_process > 80 and difference < 1e-4
