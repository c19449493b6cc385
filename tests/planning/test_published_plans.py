"""The bars of `benchmarks/planning.py`, with the predictions of today for the measurements that it has published."""

import statistics

import pytest
from planned_programs import results

from tfdist.planning.cost_terms import Conditions
from tfdist.planning.link_costs import LinkSpeed
from tfdist.planning.measurements import Measurements
from tfdist.planning.search import find_plans

LINKS = {"unshaped": None, "1 Gbit/s": 1e9, "100 Mbit/s": 1e8, "10 Mbit/s": 1e7, "300 Mbit/s": 3e8}
MEMORY_BYTES = 2**40


@pytest.fixture(scope="module")
def cells():
    """By model and link: the predicted seconds of `fit` in the order of the plans, and the measured ones."""
    document = results("planning")
    found = {}
    for cell in (*document["grid"], *document["unseen"]):
        measured = Measurements.from_json(document["measurements"][cell["model"]])
        rate = LINKS[cell["link"]]
        link = LinkSpeed.ethernet(rate) if rate else LinkSpeed(1e12)
        plans = find_plans(measured, Conditions(link, MEMORY_BYTES, allow_compression=True), 2).plans
        predicted = {variant(plan): plan.step_seconds for plan in reversed(plans) if is_compared(plan)}
        found[cell["model"], cell["link"]] = dict(reversed(predicted.items())), cell["measured"]
    return found


def is_compared(plan):
    return plan.strategy.name == "MultiWorkerMirroredStrategy" and not set(plan.strategy.arguments) - {"compression"}


def variant(plan):
    return f"fit {plan.compression or 'dense'}{', XLA' * plan.jit_compile}"


def regrets(cells, models):
    """By how much the plan that is chosen takes longer than the fastest one that was measured."""
    for (model, _), (predicted, measured) in cells.items():
        if model in models:
            chosen = next(name for name in predicted if name in measured)
            yield measured[chosen] / min(measured.values())


@pytest.mark.parametrize("models", [("cnn", "mlp", "text"), ("lstm", "gan")])
def test_the_chosen_plan_is_nearly_the_fastest(cells, models):
    found = sorted(regrets(cells, models))
    assert found[-1] <= 1.25
    assert sum(one > 1.10 for one in found) <= len(found) // 12


@pytest.mark.parametrize("models", [("cnn", "mlp", "text"), ("lstm", "gan")])
def test_step_times_are_as_predicted(cells, models):
    errors = [
        abs(predicted[name] / seconds - 1)
        for (model, _), (predicted, measured) in cells.items()
        for name, seconds in measured.items()
        if model in models and name in predicted
    ]
    assert statistics.median(errors) <= 0.10
    assert statistics.quantiles(errors, n=10)[-1] <= 0.25


def test_memory_is_as_predicted():
    for row in results("planning")["memory"]:
        assert row["predicted"] == pytest.approx(row["measured"], rel=0.15), row["what"]


def test_more_workers_take_as_long_as_predicted():
    for row in results("planning")["workers"]:
        assert row["predicted"] == pytest.approx(row["measured"], rel=0.20), row["what"]
