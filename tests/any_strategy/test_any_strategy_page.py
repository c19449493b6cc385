"""What docs/any_strategy.md tells readers to run does what it says."""

import re
from pathlib import Path

import pytest
import tensorflow as tf
from stock_strategy import FakeTPUStrategy

pytestmark = pytest.mark.usefixtures("cpus")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "any_strategy.md"


def test_the_trial_for_tpus_works(tmp_path, capsys):
    *_, program = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names = {}
    exec(compile(program, str(PAGE), "exec"), names)
    for number, strategy in enumerate([FakeTPUStrategy(), tf.distribute.get_strategy()]):
        names["check"](strategy, tmp_path / str(number))
    differences = [float(line.rpartition(" ")[2]) for line in capsys.readouterr().out.splitlines()]
    assert len(differences) == 4
    assert max(differences[::2]) <= 1e-6 and differences[1::2] == [0.0, 0.0]
