"""N replicas compute what one process computes on the concatenated batch: every case on every shape of a cluster."""

import ast
from pathlib import Path

import pytest
from comparison import TOLERANCE, largest_difference
from setups import SETUPS, run_cases

# Learned from the sources: importing the cases would start TensorFlow in the process that only starts others.
_NAMES: dict[str, bool] = {}
for _file in sorted(Path(__file__).parent.glob("*_cases.py")):
    for _node in ast.parse(_file.read_text()).body:
        for _decorator in getattr(_node, "decorator_list", []):
            if isinstance(_decorator, ast.Call) and getattr(_decorator.func, "id", "") == "case":
                _NAMES[_node.name] = any(keyword.arg == "workers_only" for keyword in _decorator.keywords)


@pytest.fixture(scope="module", params=SETUPS, ids=str)
def results(request, tmp_path_factory):
    """The results of all cases on one shape of a cluster, which is started once."""
    output = tmp_path_factory.mktemp("parity") / "results.json"
    return request.param, run_cases(request.param, output, tmp_path_factory.getbasetemp() / "references")


@pytest.mark.multi_process
@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("name", sorted(_NAMES))
def test_replicas_equal_one_process(results, name):
    setup, by_name = results
    if _NAMES[name] and setup.workers == 1:
        assert name not in by_name, "a case about workers ran without them"
        return
    result = by_name[name]
    assert "error" not in result, result["error"]
    assert result["difference"] <= TOLERANCE
    assert result["rank_difference"] == 0.0, "the workers' weights differ"


def test_the_stock_optimizers_are_among_the_cases(results):
    setup, by_name = results
    swept = {name: result for name, result in by_name.items() if name.startswith("optimizer_")}
    assert len(swept) >= 10
    assert not {name: result for name, result in swept.items() if result.get("difference", 1.0) > TOLERANCE}


@pytest.mark.parametrize(
    ("ours", "reference"),
    [
        ({"weights": [1.0]}, {"weights": [1.1]}),
        ([float("nan")], [1.0]),
        ([1000.0], [1000.1]),
    ],
)
def test_the_comparison_sees_a_difference(ours, reference):
    assert largest_difference(ours, reference) > TOLERANCE
