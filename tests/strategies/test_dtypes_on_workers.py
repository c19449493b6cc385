"""Variables, sums and models of all dtypes on two workers, and of bfloat16 on two devices."""

from pathlib import Path

import numpy as np
import on_workers_dtypes
import pytest
import tensorflow as tf
from launched_runs import launch_once
from one_process import in_one_process
from shared_workers import run_of_program

from tfdist.strategies import MirroredStrategy

pytestmark = pytest.mark.usefixtures("cpus")
_SCRIPT = Path(on_workers_dtypes.__file__)
# Two replicas round sums of bfloat16 (2**-8) at other places, float8 quantizes by scales that follow these sums.
_TOLERANCES = {"bfloat16": 2**-7, "int8": 1e-6, "int4": 1e-6, "float8": 1e-3}


@pytest.fixture(scope="module")
def workers(request):
    run = run_of_program(request, "on_workers_dtypes")
    return [run.json(f"seen-{rank}.json") for rank in range(2)]


@pytest.fixture(scope="module")
def more(tmp_path_factory):
    run = launch_once(tmp_path_factory, "more dtypes", _SCRIPT, "MORE_MODELS", options=["--workers", "2"])
    return [run.assert_complete().json(f"seen-{rank}.json") for rank in range(2)]


def assert_equals_one_process(model, *ours):
    program = {**on_workers_dtypes.MODELS, **on_workers_dtypes.MORE_MODELS}[model]
    # Keras cannot train with float8 eagerly.
    one = program(tf.distribute.get_strategy()) if model == "float8" else in_one_process(program)
    for other in ours:
        assert other["dtypes"] == one["dtypes"]
        assert other["weights"] == ours[0]["weights"], "replicas differ"
        for name in ("loss", "prediction"):
            np.testing.assert_allclose(other[name], one[name], atol=_TOLERANCES[model], rtol=_TOLERANCES[model])
        for our_weight, weight in zip(other["weights"], one["weights"], strict=True):
            np.testing.assert_allclose(our_weight, weight, atol=_TOLERANCES[model], rtol=_TOLERANCES[model])


@pytest.mark.multi_process
def test_all_copies_of_a_variable_have_the_bits_of_the_chief(workers):
    for rank in workers:
        assert len(rank["variables"]) == 3 * (len(on_workers_dtypes.DTYPES) + 1)
        for what, (copies, of_chief) in rank["variables"].items():
            assert copies == [of_chief], what


@pytest.mark.multi_process
def test_sums_and_gathered_values_of_all_dtypes(workers):
    for rank in workers:
        for dtype, (found, right) in rank["exchanges"].items():
            assert found == right, dtype


@pytest.mark.multi_process
@pytest.mark.parametrize("model", on_workers_dtypes.MODELS)
def test_models_equal_one_process(workers, model):
    assert_equals_one_process(model, *(rank[model] for rank in workers))


@pytest.mark.long
@pytest.mark.multi_process
@pytest.mark.parametrize("model", on_workers_dtypes.MORE_MODELS)
def test_more_models_equal_one_process(more, model):
    assert_equals_one_process(model, *(rank[model] for rank in more))


@pytest.mark.long
@pytest.mark.multi_process
@pytest.mark.parametrize("model", {**on_workers_dtypes.MODELS, **on_workers_dtypes.MORE_MODELS})
def test_models_with_sharded_state_equal_one_process(more, model):
    assert_equals_one_process(model, *(rank[f"sharded {model}"] for rank in more))


@pytest.mark.long
@pytest.mark.multi_process
@pytest.mark.parametrize("model", [*on_workers_dtypes.MODELS, "uint8"])
def test_interrupted_trainings_resume_with_the_same_bits(more, model):
    for rank in more:
        seen = rank[f"resumed {model}"]
        assert 0 < seen["batches"] < 8  # of two epochs
        assert seen["resumed"] == seen["whole"]


def test_a_pure_bfloat16_model_on_two_devices_equals_one_process(cpus):
    ours = on_workers_dtypes.pure_bfloat16(MirroredStrategy(cpus[:2]))
    assert_equals_one_process("bfloat16", ours)
