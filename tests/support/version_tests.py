"""The tests that `make matrix` runs with each pair of versions, by group."""

from collections.abc import Sequence

_ONE_PROCESS = (
    "accumulation_with_clipping_ema_decay_and_schedule compiled_by_xla custom_train_step everything_on_arrays "
    "compute_loss_that_adds_a_mean logs_under_other_names loss_scale_overflow_on_one_replica masked_sequences "
    "synchronized_batch_normalization"
).split()
_MICRO_BATCHES = "custom_train_step generative_adversarial_networks masked_sequences".split()
_WORKERS = (
    "accumulation_with_clipping_ema_decay_and_schedule everything_on_arrays masked_sequences step_of_the_guide"
).split()
_ON_A_CLUSTER = {
    "test_equal_to_one_process": (
        "all_losses_of_pushes all_losses_of_rounds custom_train_step no_staleness_is_one_process optimizer_features "
        "own_loss_of_rounds"
    ).split(),
    "test_equal_to_one_process_as_replicas_are": ["masked_sequences"],
}
_CLUSTER = "tests/parameter_server/test_cluster_training.py::"
_PARITY = "tests/parity/test_parity.py::test_replicas_equal_one_process"
_MICRO = "tests/training/test_micro_batches.py::test_micro_batches_equal_the_whole_batch"

# Files, tests, and tests with the name of a case.
GROUPS: dict[str, list[str]] = {
    "canaries": ["tests/strategies/test_version_canaries.py", "tests/test_private_attributes.py"],
    "one process": [
        *(f"{_PARITY}[2 local replicas-{name}]" for name in _ONE_PROCESS),
        *(f"{_MICRO}[{name}]" for name in _MICRO_BATCHES),
        "tests/strategies/test_mirrored_strategy.py",
        "tests/callbacks/test_gradient_accumulation.py",
        "tests/keras_internals/test_progress_bar.py",
    ],
    "compression": ["tests/strategies/test_compressed_training.py"],
    "recovery": [
        "tests/callbacks/test_failure_recovery.py",
        "tests/recovery/test_callback_state.py",
    ],
    "workers": [
        *(f"{_PARITY}[2 workers x 1-{name}]" for name in _WORKERS),
        "tests/strategies/test_multi_worker_strategy.py",
        "tests/chaos/test_workers.py::test_disturbed_workers_end_as_if_nothing_had_happened[2 workers, a kill]",
    ],
    "parameter servers": [
        *(f"{_CLUSTER}{test}[{name}]" for test, names in _ON_A_CLUSTER.items() for name in names),
        f"{_CLUSTER}test_mixed_precision_overflows_learns_and_scales",
        f"{_CLUSTER}test_400_asynchronous_steps_lose_nothing",
        f"{_CLUSTER}test_pushed_updates_are_constrained_and_skipped",
        f"{_CLUSTER}test_a_plain_process_loads_what_was_saved",
    ],
}
# Tests of what older versions of Keras cannot do without a strategy either, and in which version Keras can.
ABSENT_BEFORE = {
    # train_on_batch passes bfloat16 logs to NumPy, which cannot read them.
    "tests/strategies/test_mirrored_strategy.py::test_a_log_of_another_dtype_than_its_metric_is_the_mean": (3, 14),
}


def selection(keras_version: str, groups: Sequence[str] = ()) -> list[str]:
    """Returns pytest's arguments that select the tests of groups, by default all, for a version of Keras.

    >>> selection("3.10.0")[-2] == "--deselect", "--deselect" in selection("3.15.1")
    (True, False)
    """
    have = tuple(int(part) for part in keras_version.split(".")[:2])
    absent = [["--deselect", test] for test, since in ABSENT_BEFORE.items() if have < since]
    tests = [test for group in groups or GROUPS for test in GROUPS[group]]
    return [*tests, *(argument for arguments in absent for argument in arguments)]


def group_of(class_name: str, name: str) -> str:
    """Returns the group of a test by its names in a report in the format of JUnit.

    >>> group_of("tests.strategies.test_multi_worker_strategy.TestOnWorkers", "test_all_stop")
    'workers'
    >>> group_of("tests.parity.test_parity", "test_replicas_equal_one_process[2 local replicas-masked_sequences]")
    'one process'
    """
    for group, tests in GROUPS.items():
        for path, _, test in (each.partition("::") for each in tests):
            module = path.removesuffix(".py").replace("/", ".")
            if f"{class_name}.".startswith(f"{module}.") and test in ("", name):
                return group
    raise ValueError(f"A test of no group. Received: {class_name} {name}.")
