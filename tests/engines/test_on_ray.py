"""`on_ray` on a local Ray: the results of `tfdist run`, refusals, losses, interrupts, and what is left."""

import signal
import subprocess
import sys
import threading
import time

import engine_functions as functions
import numpy as np
import pytest
from engine_runs import (
    assert_identical,
    engine_environment,
    eventually,
    launched_processes,
    ray_directory,
    weights_of_run,
)

from tfdist.launch import WorkerError, on_ray

ray = pytest.importorskip("ray", reason="needs the extra `ray`")
psutil = pytest.importorskip("psutil")

ACTOR = 3  # see `engine_functions.ancestor`
LOCAL = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 80_000_000, "logging_level": "warning"}


@pytest.fixture(scope="module")
def temporary(tmp_path_factory):
    """The directory of temporary files of this process and of places."""
    directory = tmp_path_factory.mktemp("temporary")
    with (
        ray_directory() as variables,
        engine_environment(directory, RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0", **variables),
    ):
        yield directory


@pytest.fixture(scope="module")
def started_ray(temporary):
    ray.init(**LOCAL)
    yield ray
    ray.shutdown()


@pytest.fixture
def local_ray(started_ray, temporary):
    """Ray with two cores; afterwards both are free, and there is no actor, no launcher, no file."""
    yield started_ray
    eventually(lambda: started_ray.available_resources().get("CPU") == 2, "cores are free")
    eventually(lambda: not launched_processes(temporary), "launchers have ended")
    eventually(lambda: not list(temporary.glob("tfdist-*")), "the directories of places")


def test_the_weights_are_those_of_tfdist_run(local_ray, reference, tmp_path):
    values = on_ray(functions.train, str(tmp_path), workers=2)
    assert [steps for _, steps in values] == [2 * functions.STEPS_OF_EPOCH] * 2
    for weights, _ in values:
        assert_identical(weights, reference)
    assert np.abs(reference[0]).max() > 0


@pytest.mark.long
def test_values_by_rank_and_the_output_of_workers(local_ray, capfd):
    assert on_ray(functions.task_and_threads, 10, workers=2) == [("worker", 0, "1"), ("worker", 10, "1")]
    assert on_ray(functions.task_and_threads, 10, workers=1, resources_per_worker={"CPU": 2}) == [("worker", 0, "2")]
    lines = capfd.readouterr().out.splitlines()
    assert sorted(line for line in lines if line.startswith("[")) == ["[0] task 0", "[0] task 0", "[1] task 1"]


@pytest.mark.long
def test_a_chief_alone_returns_a_value(local_ray):
    assert on_ray(functions.task_and_threads, 10, workers=2, chief=True) == [("chief", 0, "1")]


@pytest.mark.long
def test_the_error_has_the_rank_and_the_users_lines(local_ray):
    with pytest.raises(WorkerError, match=r"Worker 1 of 2 failed: KeyError: 'no such column'") as caught:
        on_ray(functions.fail_in_one, "no such column", workers=2)
    assert caught.value.rank == 1 and "raise KeyError(message)" in caught.value.traceback


def test_resources_that_are_not_there_are_named(local_ray):
    with pytest.raises(TimeoutError, match=r"Received: a cluster with {.*'CPU': 2.0.* Expected: workers=3, each with"):
        on_ray(functions.task_and_threads, 1, workers=3, start_timeout_seconds=1)
    with pytest.raises(TimeoutError, match=r"each with {'GPU': 1}"):
        on_ray(functions.task_and_threads, 1, workers=1, resources_per_worker={"GPU": 1}, start_timeout_seconds=1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"resources_per_worker": {"CPU": -1}}, "Invalid `resources_per_worker`. Received: {'CPU': -1}"),
        ({"resources_per_worker": {}}, "Invalid `resources_per_worker`"),
        ({"resources_per_worker": {"CPU": "2"}}, "Invalid `resources_per_worker`"),
        ({"placement_strategy": "pack"}, "Invalid `placement_strategy`. Received: 'pack'. Expected: one of PACK"),
        ({"workers": 0}, "Invalid `workers`"),
    ],
)
def test_invalid_options(options, words):
    with pytest.raises(ValueError, match=words):
        on_ray(functions.task_and_threads, 1, **{"workers": 1, **options})


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, ACTOR])
def test_a_killed_process_changes_no_weight(local_ray, reference, tmp_path, victim, capfd):
    values = on_ray(functions.train, str(tmp_path), victim, workers=2, max_restarts=1)
    assert (tmp_path / "killed").exists()
    assert all(steps < 2 * functions.STEPS_OF_EPOCH for _, steps in values), "resumed"
    for weights, _ in values:
        assert_identical(weights, reference)
    assert ("restarting in new places (0 restarts left)" in capfd.readouterr().err) == (victim == ACTOR)


@pytest.mark.long
def test_stages_have_the_weights_of_tfdist_run(local_ray, tmp_path):
    [weights] = on_ray(functions.train_in_stages, workers=2, chief=True)
    assert_identical(weights, weights_of_run(tmp_path, "chief-0.npz", "--chief"))


@pytest.mark.long
def test_a_lost_actor_ends_the_call(local_ray):
    start = time.monotonic()
    with pytest.raises(WorkerError, match=r"no restart is left. Received: place 1 was lost"):
        on_ray(functions.lose_place, ACTOR, workers=2)
    assert time.monotonic() - start < 30, "not after the minute of place 0"
    assert on_ray(functions.task_and_threads, 1, workers=2) == [("worker", 0, "1"), ("worker", 1, "1")]


@pytest.mark.long
def test_an_interrupt_lets_the_function_save(local_ray, tmp_path):
    def interrupt():
        eventually(lambda: len(list(tmp_path.glob("started-*"))) == 2, "started")
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        on_ray(functions.wait_for_signal, str(tmp_path), workers=2)
    assert len(list(tmp_path.glob("saved-*"))) == 2
    thread.join()


DRIVER = """
import sys
import engine_functions, ray
from tfdist.launch import on_ray
ray.init(address=sys.argv[1], logging_level="warning")
on_ray(engine_functions.wait_for_signal, sys.argv[2], workers=2)
"""


@pytest.mark.long
def test_the_places_of_a_killed_driver_end(local_ray, tmp_path):
    address = ray.get_runtime_context().gcs_address
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, address, str(tmp_path)])
    try:
        eventually(lambda: len(list(tmp_path.glob("started-*"))) == 2, "started")
    finally:
        driver.kill()
        driver.wait()
    eventually(lambda: len(list(tmp_path.glob("saved-*"))) == 2, "saved")


@pytest.mark.long
def test_a_task_of_ray_calls_on_ray(local_ray):
    @ray.remote(num_cpus=0)
    def call():
        return on_ray(functions.task_and_threads, 1, workers=2)

    assert ray.get(call.remote(), timeout=120) == [("worker", 0, "1"), ("worker", 1, "1")]
