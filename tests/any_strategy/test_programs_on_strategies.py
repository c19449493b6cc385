"""Optimizer x strategy x option: a table of what a program can be made of, each case equal to one process.

Every two values meet in one of the cases: by default those that contain others, in the long tests all. The long tests
have every combination, too, with the optimizer that has most to do.
"""

import keras
import pytest
import tensorflow as tf
from testing import data, models
from testing.optimizers import OPTIMIZERS
from testing.pairs import case_name, pairwise, product
from testing.programs import Program
from testing.same_training import assert_same_training

from tfdist.strategies import MirroredStrategy, ModelParallelStrategy, Pipeline, ShardedState


class InParts(MirroredStrategy):
    """Computes a batch in two parts, as a strategy of workers does whose `micro_batches` are 2."""

    micro_batches = 2


STRATEGIES = {
    "replicas": lambda cpus: MirroredStrategy(cpus[:2]),
    "three replicas": lambda cpus: MirroredStrategy(cpus[:3]),
    "sharded state": lambda cpus: MirroredStrategy(cpus[:2], shard_optimizer_state=True),
    "split sums": lambda cpus: MirroredStrategy(cpus[:3], shard_optimizer_state=ShardedState(accumulators=True)),
    "micro-batches": lambda cpus: InParts(cpus[:1]),
    "stages": lambda cpus: ModelParallelStrategy(cpus[:2], pipeline=Pipeline(2, 2)),
    "stages and columns": lambda cpus: ModelParallelStrategy(cpus, pipeline=Pipeline(2, 2), data_parallel=2),
}
PROGRAMS = {
    "classes": (models.classifier, data.CLASSES),
    "words": (models.words, data.WORDS),
    "numbers and words": (models.numbers_and_words, data.NUMBERS_AND_WORDS),
    "sequences": (models.sequence, data.SEQUENCES),
}
EXECUTIONS = {
    "one step": {},
    "two steps": {"steps_per_execution": 2},
    "eager": {"run_eagerly": True},
    "compiled": {"jit_compile": True},
}
FACTORS = {
    "strategy": list(STRATEGIES),
    "optimizer": sorted(OPTIMIZERS),
    "program": list(PROGRAMS),
    "execution": list(EXECUTIONS),
    "micro_steps": [1, 2],
    "rows": [24, 22],
}
BY_DEFAULT = {
    **FACTORS,
    "strategy": [name for name in STRATEGIES if name not in ("three replicas", "stages")],
    "optimizer": ["everything_scaled"],
    "program": ["numbers and words", "sequences"],
    "execution": ["one step", "eager"],
}


def is_allowed(case):
    """Whether a strategy has the option, and the case has a reference."""
    in_stages = case["strategy"].startswith("stages") and case["execution"] in ("eager", "compiled")
    # A mean of the means of unequal batches is none of the samples.
    return not in_stages and not (case["micro_steps"] > 1 and case["rows"] % 8)


PAIRS = pairwise(BY_DEFAULT, is_allowed)
MORE = pairwise(FACTORS, is_allowed) + product({**FACTORS, "optimizer": ["everything_scaled"]}, is_allowed)


def check(cpus, case):
    model, samples = PROGRAMS[case["program"]]
    program = Program(
        model,
        samples.first(case["rows"]),
        case["optimizer"],
        micro_steps=case["micro_steps"],
        batch_size=8 // case["micro_steps"],
        compile=EXECUTIONS[case["execution"]],
    )
    assert_same_training(STRATEGIES[case["strategy"]](cpus), program)


@pytest.mark.parametrize("case", PAIRS, ids=case_name)
def test_every_two_values(cpus, case):
    check(cpus, case)


@pytest.mark.long
@pytest.mark.parametrize(
    "case", [case for index, case in enumerate(MORE) if case not in PAIRS + MORE[:index]], ids=case_name
)
def test_more_optimizers_and_combinations(cpus, case):
    check(cpus, case)


def test_cases_have_all_pairs():
    table = {"a": [1, 2, 3], "b": [4, 5], "c": [6, 7]}
    cases = pairwise(table, lambda case: (case["a"], case["b"]) != (1, 4))
    assert {(case["a"], case["c"]) for case in cases} == {(a, c) for a in table["a"] for c in table["c"]}
    assert {(case["a"], case["b"]) for case in cases} == {(1, 5), (2, 4), (2, 5), (3, 4), (3, 5)}
    assert len(cases) == 6


def faster_on_replicas():
    return keras.optimizers.SGD(0.1 * tf.distribute.get_strategy().num_replicas_in_sync)


def test_another_update_is_found(cpus):
    with pytest.raises(AssertionError, match="weights"):
        assert_same_training(MirroredStrategy(cpus[:2]), Program(optimizer=faster_on_replicas))
