"""N replicas compute what one process computes on the concatenated batch: the cases on every shape of a cluster."""

import ast
from pathlib import Path

import pytest
from comparison import TOLERANCE, largest_difference
from setups import SETUPS, Setup, run_cases

# Learned from the sources: importing the cases would start TensorFlow in the process that only starts others.
_WORKERS_ONLY: dict[str, bool] = {}
for _file in sorted(Path(__file__).parent.glob("*_cases.py")):
    for _node in ast.parse(_file.read_text()).body:
        for _decorator in getattr(_node, "decorator_list", []):
            if isinstance(_decorator, ast.Call) and getattr(_decorator.func, "id", "") == "case":
                _WORKERS_ONLY[_node.name] = any(keyword.arg == "workers_only" for keyword in _decorator.keywords)

# What differs from the other cases within Keras alone, and what tests/training has, too (losses of users, two
# optimizers): left to `make parity`.
_LEFT_OUT = set(
    "added_losses_of_static_batches constraints embedding_with_clipvalue generative_adversarial_networks "
    "loss_function_that_averages metrics_of_binary_classifiers metrics_of_classifiers metrics_of_regressors "
    "own_losses_and_logs own_losses_of_static_batches run_eagerly_without_samples two_optimizers_in_a_step".split()
)
# Contained in other cases (accumulation, arrays, overflows, sparse labels), or by default on two workers or parameter
# servers, in micro-batches, or under schedules of GradientAccumulation. `make matrix` runs XLA.
_LONG_ON_REPLICAS = set(
    "accumulation_by_callback accumulation_that_changes adam alignment_losses batch_logs class_weights compiled_by_xla "
    "compute_loss_of_the_users_own decorated_steps_and_losses embedding_with_global_clipnorm endpoint_layers "
    "everything_on_arrays global_clipnorm last_batch_of_one_sample last_partial_batch lookups_without_samples "
    "loss_function_that_averages_with_weights loss_scale loss_scale_overflow_on_one_replica masked_sequences "
    "mean_with_sample_weight metrics_of_sparse_labels on_batch_methods regularizers run_eagerly "
    "run_eagerly_with_accumulation sample_weights seeded_shuffle_and_cache static_sizes step_of_the_guide "
    "steps_per_execution texts".split()
)
_ON_WORKERS = set(
    "accumulation_with_clipping_ema_decay_and_schedule compiled_by_xla convolutions_without_samples "
    "decorated_steps_and_losses "
    "everything_on_arrays lookups_without_samples loss_scale_overflow_on_one_replica masked_sequences "
    "stateful_layers static_sizes step_of_the_guide sum_reduction uneven_workers_of_known_size "
    "uneven_workers_of_unknown_size".split()
)

_OF_SEVERAL_DEVICES_A_WORKER = set(
    "accumulation_with_clipping_ema_decay_and_schedule custom_loop everything_on_arrays masked_sequences static_sizes "
    "synchronized_batch_normalization uneven_workers_of_known_size uneven_workers_of_static_size".split()
)
# By default two local replicas have these, and tests/strategies/test_xla.py compiles.
_LONG_ON_WORKERS = set(
    "compiled_by_xla convolutions_without_samples stateful_layers static_sizes static_sizes_in_micro_batches "
    "sum_reduction uneven_workers_of_known_size uneven_workers_of_static_size".split()
)
# By default tests/strategies trains on workers of several devices (test_multi_worker_strategy.py, with static sizes,
# and test_unequal_workers.py).
_LONG = {
    SETUPS[0]: _LONG_ON_REPLICAS,
    SETUPS[1]: _LONG_ON_WORKERS,
    SETUPS[2]: _OF_SEVERAL_DEVICES_A_WORKER,
}


def _runs_on(name: str, setup: Setup) -> bool:
    """Optimizers, losses and metrics know nothing of workers, and two cores are few: `make parity` has all."""
    if setup == SETUPS[0]:
        return not _WORKERS_ONLY[name] and name not in _LEFT_OUT
    if setup.devices > 1:
        return name in _OF_SEVERAL_DEVICES_A_WORKER
    return _WORKERS_ONLY[name] or name in _ON_WORKERS


_LONG_MARKS = [pytest.mark.long, pytest.mark.version_matrix]
_PAIRS = [
    pytest.param(setup, name, marks=_LONG_MARKS if name in _LONG[setup] else [])
    for setup in SETUPS
    for name in sorted(_WORKERS_ONLY)
    if _runs_on(name, setup)
]


@pytest.fixture(scope="module")
def results_on(tmp_path_factory, request):
    """The results of the cases of all selected tests on a shape of a cluster, which is started once."""
    results = {}
    tests = [test for test in request.session.items if "results_on" in getattr(test, "fixturenames", ())]
    selected = [test.callspec.params for test in tests]

    def run(setup):
        if setup not in results:
            names = [test["name"] for test in selected if test["setup"] == setup]
            output = tmp_path_factory.mktemp("parity") / "results.json"
            results[setup] = run_cases(setup, output, tmp_path_factory.getbasetemp() / "references", names)
        return results[setup]

    return run


@pytest.mark.multi_process
@pytest.mark.slow
@pytest.mark.timeout(2700)
@pytest.mark.parametrize(("setup", "name"), _PAIRS, ids=str)
def test_replicas_equal_one_process(results_on, setup, name):
    result = results_on(setup)[name]
    assert "error" not in result, result["error"]
    assert result["difference"] <= TOLERANCE
    assert result["rank_difference"] == 0.0, "the workers' weights differ"


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
