"""The variables of a training: saved half-way and restored into new objects, a training ends with the same bits."""

import itertools

import keras
import numpy as np
import pytest
import trainings
from child_environment import run_python
from graph_optimizations import grappler
from trainings import END, HALF, SPEC, compiled, made, restore, saved, shift_names, steps

from tfdist.keras_internals.accumulation import Accumulation
from tfdist.recovery.resharding import group_by_variable
from tfdist.recovery.trained_model import TrainedModel
from tfdist.recovery.variable_snapshots import VariableSnapshots

pytestmark = pytest.mark.usefixtures("cpus")
# Under TensorFlow's per_replica strategy Keras cannot accumulate on two replicas.
# Contained in others: accumulators in `workers`, residuals and float16 that accumulates in the new process.
LONG_PAIRS = [
    ("average", "stock"),
    ("average", "tfdist"),
    ("accumulation", "none"),
    ("float16_accumulation", "tfdist"),
    ("float16", "topk"),
    ("accumulation", "powersgd"),
]
PAIRS = [
    *[(case, "none") for case in trainings.CASES if case != "accumulation"],
    ("float16", "stock"),
    ("unusual", "tfdist"),
    ("accumulation", "workers"),
    *[pytest.param(*pair, marks=pytest.mark.long) for pair in LONG_PAIRS],
]


def assert_same(state, expected):
    for part in ("shared", "per_replica"):
        assert state[part].keys() == expected[part].keys()
        for name, value in expected[part].items():
            assert state[part][name].dtype == value.dtype, name
            np.testing.assert_array_equal(state[part][name], value, name)
    assert state["generators"] == expected["generators"]


@pytest.mark.parametrize(("case", "setup"), PAIRS)
def test_new_objects_resume_with_the_same_bits(case, setup):
    model = made(case, setup)
    steps(model, 0, HALF)
    half = saved(model)
    logs = steps(model, HALF, END)
    expected = saved(model)
    keras.backend.clear_session()
    shift_names()
    other = made(case, setup)
    restore(other, half)
    assert_same(saved(other), half)
    assert steps(other, HALF, END) == logs
    assert_same(saved(other), expected)


def test_a_new_process_resumes_with_the_same_bits(tmp_path):
    setups = {"global_seeds": "none", "float16_accumulation": "powersgd"}
    expected = {}
    with grappler("twice"):  # as in the new process
        for case, setup in setups.items():
            model = made(case, setup)
            steps(model, 0, HALF)
            trainings.write(saved(model), tmp_path / case)
            steps(model, HALF, END)
            expected[case] = saved(model)
    run_python(trainings.__file__, tmp_path, *itertools.chain(*setups.items()))
    for case in setups:
        assert_same(trainings.read(tmp_path / case / "after"), expected[case])


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_accumulation_that_a_callback_began_resumes(policy):
    model = compiled(keras.optimizers.Adam(0.01, gradient_accumulation_steps=2), policy=policy)
    steps(model, 0, HALF)
    half = saved(model)
    steps(model, HALF, END)
    expected = saved(model)
    other = compiled(keras.optimizers.Adam(0.01), policy=policy)
    VariableSnapshots(TrainedModel(other)).build(SPEC)
    Accumulation(other).change(half["description"]["accumulation_steps"])
    restore(other, half)
    steps(other, HALF, END)
    assert_same(saved(other), expected)


def test_the_cases_save_what_they_are_for():
    """What is saved half-way differs from what new objects begin with."""
    model = made("float16_accumulation", "powersgd")
    steps(model, 0, HALF)
    state = saved(model)
    per_replica = group_by_variable(state["per_replica"])
    assert np.any(per_replica["accumulators/1/0"][0]) and np.any(
        per_replica["accumulators/1/0"][0] != per_replica["accumulators/1/0"][1]
    )
    residuals = per_replica["compression/weights/2.Dense/0/residual"]
    assert np.any(residuals[0]) and np.any(residuals[0] != residuals[1])
    assert np.any(per_replica["state/3.BatchNormalization/0"][1])
    assert per_replica["seeds/4.Dropout/0"][0][1] == HALF
    assert per_replica["metrics/0.Mean/1"][0] > 0
    assert state["shared"]["optimizer/0.LossScaleOptimizer/3"] == 2.0**15


def test_variables_are_where_they_belong():
    model = made("unusual", "none")
    VariableSnapshots(TrainedModel(model)).build(SPEC)
    state = saved(model)
    frozen = next(name for name, path in state["description"]["paths"].items() if path.endswith("frozen/kernel"))
    assert frozen.startswith("weights/") and frozen in state["shared"]
    assert {"weights/0.Unusual/0", "optimizer/1.SGD/2"} <= state["shared"].keys()
    assert {"state/0.Unusual/0@0", "seeds/0.Unusual/0@0"} <= state["per_replica"].keys()


def test_a_snapshot_is_a_copy_that_stays():
    model = made("accumulation", "tfdist")
    steps(model, 0, HALF)
    variables = VariableSnapshots(TrainedModel(model))
    shared, per_replica, _ = variables.snapshot()
    before = {name: value.tobytes() for name, value in {**shared, **per_replica}.items()}
    # TensorFlow would not overwrite memory that a view of it still holds; it would have to copy it in the next step.
    assert all(value.flags.owndata and value.base is None for value in [*shared.values(), *per_replica.values()])
    steps(model, HALF, END)
    assert any(value.tobytes() != before[name] for name, value in variables.snapshot()[0].items())
    assert {name: value.tobytes() for name, value in {**shared, **per_replica}.items()} == before


def test_the_variables_do_not_change_with_what_they_were_restored_from():
    model = made("average", "tfdist")
    steps(model, 0, 1)
    state = saved(model)
    restore(model, state)
    before = saved(model)
    for value in [*state["shared"].values(), *state["per_replica"].values()]:
        value[...] = 1
    assert_same(saved(model), before)


# Those whose variables are not just one or two of a weight's shape.
OPTIMIZERS = {
    "adafactor": lambda: keras.optimizers.Adafactor(0.1),
    "ftrl": lambda: keras.optimizers.Ftrl(0.1),
    "muon": lambda: keras.optimizers.Muon(0.1),
    "nadam": lambda: keras.optimizers.Nadam(0.1),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.1, centered=True, momentum=0.9),
    "schedule_free": lambda: keras.optimizers.ScheduleFreeAdamW(0.1),
    "several": lambda: keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(keras.optimizers.Adam(0.1), {".*bias": keras.optimizers.SGD(0.1, momentum=0.5)})
    ),
}
LONG = ("ftrl", "nadam", "rmsprop")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in OPTIMIZERS])
def test_optimizers_with_unusual_variables_resume(name):
    model = compiled(OPTIMIZERS[name]())
    steps(model, 0, 2)
    half = saved(model)
    steps(model, 2, 4)
    other = compiled(OPTIMIZERS[name]())
    restore(other, half)
    steps(other, 2, 4)
    assert_same(saved(other), saved(model))
