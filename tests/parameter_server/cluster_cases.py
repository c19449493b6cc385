"""Registers cases that the chief of a cluster runs, and compares them with one process.

A case is a function of a folder that returns what the test checks. Each case creates its strategies; all strategies of
the chief's process share its cluster.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from comparison import largest_difference
from one_process import in_one_process

Outcome = dict[str, Any]
Program = Callable[[Any], Outcome]

CASES: dict[str, Callable[[Path], Outcome]] = {}

ROUNDS = ["momentum_2"]
# Contained in `everything_on_arrays`, which trains with Adam on uneven batches and validates.
LONG_ROUNDS = ["adam_1"]
# The cases of tests/parity that run under parameter servers: those that no case here contains.
PARITY = (
    "compute_loss_of_the_users_own everything_on_arrays masked_sequences on_batch_methods steps_per_execution "
    "texts two_optimizers_in_a_step"
).split()
# Contained in the cases `callbacks`, `table_in_two_parts`, and the others in `optimizer_features`, which fail if one of
# them does.
LONG_PARITY = "batch_logs embedding_with_global_clipnorm constraints ema loss_scale weight_decay".split()
OWN = (
    "all_losses_of_pushes all_losses_of_rounds batch_normalization bfloat16_pull custom_train_step "
    "data_sets_of_workers dict_inputs no_staleness_is_one_process optimizer_features own_loop "
    "own_loss_of_rounds own_values_in_logs sources table_in_two_parts tables_in_a_layer_without_build "
    "two_updates_of_one_tape updates_that_depend_on_each_other dependent_updates_one_at_a_time"
).split()
OTHERS = (
    "callbacks compiled_by_xla dependent_updates_that_cannot_be "
    "moving_parts data_sets_that_cannot_be mixed_float16 nothing_is_lost bounded_staleness "
    "constraints_and_overflow error_of_a_worker error_while_tracing asynchronous_pushes synchronous_pushes "
    "federated_averaging federated_adam_of_some_clients federated_single_steps_are_one_process "
    "federated_with_everything federated_errors methods_train transferred_bytes placement rows_of_a_table saved "
    "tutorial loop_with_a_loss_scale partitioned_variables"
).split()

# `make test-long` has them. `all_losses_of_rounds` contains the losses, masks and accumulation of the first four;
# `updates_that_depend_on_each_other` updates twice, with two optimizers, as the next two do;
# `own_values_in_logs` has a `train_step`, steps in an execution and `train_on_batch`.
CONTAINED = (
    "momentum_2 masked_sequences all_losses_of_pushes own_loss_of_rounds "
    "two_updates_of_one_tape two_optimizers_in_a_step "
    "custom_train_step steps_per_execution on_batch_methods"
).split()

SAMPLES, FEATURES = 203, 6
_random = np.random.default_rng(0)
INPUTS = _random.normal(size=(SAMPLES, FEATURES)).astype("float32")
LABELS = (INPUTS.sum(1) > 0).astype("int64") + (INPUTS[:, 0] > 1)


def cases_of(tests: Iterable[Any]) -> list[str]:
    """Returns the cases that tests of pytest need, or all if none of them names one.

    A test of the cluster names its cases by a parameter, by a fixture, or in a constant of its code.
    """
    every, named = [*ROUNDS, *PARITY, *OWN, *OTHERS], set()
    for test in tests:
        fixtures = getattr(test, "fixturenames", ())
        if "cluster" in fixtures:
            parameters = test.callspec.params.values() if hasattr(test, "callspec") else ()
            mentioned = (*parameters, *fixtures, *test.function.__code__.co_consts)
            named.update(name for name in every if name in mentioned)
    return [name for name in every if name in named] or every


def case(function: Callable[[Path], Outcome]) -> Callable[[Path], Outcome]:
    """Registers a case by its function's name."""
    CASES[function.__name__] = function
    return function


def compared(
    name: str, make: Callable[[], Any], program: Program, reference: Program | None = None, *, traced: bool = False
) -> None:
    """Registers a case that returns how far `program` under the strategy of `make` is from one process.

    Args:
      name: the case's name.
      make: creates the strategy.
      program: what to run under it.
      reference: what to run in one process; None: the same program.
      traced: whether the reference runs in graphs, too. Eagerly, Keras weights the logged losses of several outputs by
        the sizes of the batches, as it knows them.
    """

    def run(_: Path) -> Outcome:
        outcome = program(make())
        expected = reference or program
        alone = expected(tf.distribute.get_strategy()) if traced else in_one_process(expected)
        return {"difference": largest_difference(outcome, alone)}

    CASES[name] = run


def classifier() -> keras.Model:
    """A small network, always with the same initial weights."""
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(3)])


def compiled(
    strategy: Any,
    optimizer: Callable[[], keras.optimizers.Optimizer],
    model: Callable[[], keras.Model] = classifier,
    **arguments: Any,
) -> keras.Model:
    """The model, compiled in the strategy's scope."""
    with strategy.scope():
        built = model()
        loss = arguments.pop("loss", None) or keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        metrics = arguments.pop("metrics", None)
        built.compile(optimizer(), loss=loss, metrics=metrics() if metrics else ["accuracy"], **arguments)
    return built
