"""The lines of code that plans give create the planned strategies. This test imports TensorFlow."""

import ast
import inspect

import keras
import pytest
from planned_programs import program

import tfdist.strategies
from tfdist.exchange import links
from tfdist.planning.cost_terms import Conditions
from tfdist.planning.group_exchanges import SEGMENT_BYTES
from tfdist.planning.link_costs import LinkSpeed
from tfdist.planning.search import find_plans

CONDITIONS = Conditions(LinkSpeed(1e9), 10**12, allow_compression=True, allow_local_updates=True, speeds=(1.0, 0.5))


def distinct_plans():
    found = {}
    for workers in (1, 2, 4):
        for plan in find_plans(program(), CONDITIONS, workers).plans:
            options = tuple(sorted(plan.strategy.arguments)), plan.gradient_accumulation_steps
            found.setdefault((plan.strategy.name, options, str(plan.strategy.arguments.get("mode"))), plan)
    return list(found.values())


PLANS = distinct_plans()


def test_every_kind_is_there():
    names = {plan.strategy.name for plan in PLANS}
    assert names == {"MultiWorkerMirroredStrategy", "ParameterServerStrategy", "ModelParallelStrategy"}
    assert len(PLANS) > 20


@pytest.mark.usefixtures("cpus")
def test_lines_create_the_strategy():
    model = keras.Sequential([keras.Input((4,)), *(keras.layers.Dense(4, name=f"dense_{index}") for index in range(8))])
    created = 0
    for plan in PLANS:
        model.compile("adam", "mse")
        names = {"model": model}
        if plan.strategy.name == "MultiWorkerMirroredStrategy":
            exec(plan.code, names)
            assert type(names["strategy"]) is tfdist.strategies.MultiWorkerMirroredStrategy
            assert model.jit_compile is plan.jit_compile
            assert (model.optimizer.gradient_accumulation_steps or 1) == plan.gradient_accumulation_steps
            created += 1
        else:  # these need a cluster: their classes are called with arguments that they have
            *before, last = ast.parse(plan.code).body
            for call in (node for node in ast.walk(last) if isinstance(node, ast.Call)):
                parameters = inspect.signature(getattr(tfdist.strategies, call.func.id)).parameters
                assert {keyword.arg for keyword in call.keywords} <= set(parameters)
            exec(compile(ast.Module(before, []), "plan", "exec"), names)
            for keyword in last.value.keywords:
                eval(compile(ast.Expression(keyword.value), "plan", "eval"), names)
    assert 8 < created < len(PLANS)


def test_steps_of_an_update_take_effect_until_the_first_step():
    optimizer = keras.optimizers.SGD()
    optimizer.gradient_accumulation_steps = 4
    optimizer.build([keras.Variable([1.0])])
    assert len(optimizer._accumulated_gradients) == 1


def test_long_lines_are_broken_outside_of_strings():
    from tfdist.planning.plan_table import code_of
    from tfdist.planning.plans import PlannedStrategy, planned_object

    cuts = [f"block {index} of the model" for index in range(20)]
    pipeline = planned_object("Pipeline", stages=21, micro_batches=4, cuts=cuts)
    code = code_of(PlannedStrategy("ModelParallelStrategy", {"pipeline": pipeline}))
    assert max(map(len, code.splitlines())) <= 112
    assert [node.value for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Constant)][-20:] == cuts


def test_sizes_are_those_of_the_exchange():
    assert SEGMENT_BYTES == links.SEGMENT_BYTES
