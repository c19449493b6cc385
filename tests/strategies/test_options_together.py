"""The table of docs/choosing_a_strategy.md that says which options work together, cell by cell."""

import re
from pathlib import Path

import numpy as np
import options_together
import pytest
from launched_runs import launch_once
from one_process import in_one_process

pytestmark = pytest.mark.usefixtures("cpus")
TABLE = options_together.table()
TOLERANCE = 5e-6  # Float32 sums of 36 steps in another order; weights are below 4.
NUMBERED = {names: number for number, names in enumerate(TABLE)}


def cells(kind):
    return [names for names, cell in TABLE.items() if cell == kind]


def test_every_pair_of_options_is_in_the_table():
    columns = {column for _, column in TABLE}
    assert {row for row, _ in TABLE} | columns == set(options_together.OPTIONS)
    assert set(TABLE.values()) == {"yes", "error"}
    pairs = {frozenset(names) for names in TABLE}
    assert len(pairs) == len(TABLE), "a pair has two cells"
    expected = {frozenset({row, column}) for row in options_together.OPTIONS for column in columns if row != column}
    assert pairs == expected - {frozenset({"`LocalSGD`", "`DiLoCo`"})}, "both are modes"


@pytest.mark.parametrize("names", cells("error"), ids=" and ".join)
def test_an_error_says_what_does_not_work_together(names):
    with pytest.raises(ValueError, match=r"(?s)Received: .*Expected: ") as raised:
        options_together.trained(names)
    said = re.sub(r"\W+", " ", str(raised.value))
    for name in names:
        word = re.sub(r"[^A-Za-z_].*", "", name.strip("`"))
        assert word in said or (word in ("LocalSGD", "DiLoCo") and "ocal updates" in said), f"{name} is not named"


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    """Two workers that have trained with each pair of options that works."""
    script = Path(__file__).with_name("on_workers_together.py")
    return launch_once(tmp_path_factory, "options together", script, options=["--workers", "2"]).assert_complete()


@pytest.mark.long
@pytest.mark.multi_process
@pytest.mark.parametrize("names", cells("yes"), ids=" and ".join)
def test_options_work_together(workers, names):
    first, second = (workers.arrays(f"together-{NUMBERED[names]}-{rank}.npz") for rank in range(2))
    for name in first:
        np.testing.assert_array_equal(first[name], second[name], name)
    weights, losses = in_one_process(lambda _: options_together.trained(names, alone=True))
    if options_together.equals_one_process(names):
        for name, value in weights.items():
            np.testing.assert_allclose(first[name], value, rtol=0, atol=TOLERANCE, err_msg=name)
    else:
        assert first["losses"][-1] < 0.8 * first["losses"][0]
        assert losses[-1] < 0.8 * losses[0], "so does that of one process"
