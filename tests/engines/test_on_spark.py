"""`on_spark` on a local cluster: the results of `tfdist run`, refusals, losses, interrupts; nothing is left."""

import concurrent.futures
import shutil
import signal
import subprocess
import sys
import threading
import time

import engine_functions as functions
import numpy as np
import pytest
from engine_runs import assert_identical, eventually, launched_processes
from local_spark import (
    CLUSTER,
    require_spark,
    spark_environment,
    spark_session,
    work_directory,
)

from tfdist.launch import WorkerError, on_spark

require_spark()
EXECUTOR = 5  # see `engine_functions.ancestor`; 3 is the Python worker, 4 its daemon


@pytest.fixture(scope="module")
def temporary(tmp_path_factory):
    """The directory of temporary files of this process and of Spark's."""
    directory = tmp_path_factory.mktemp("temporary")
    with spark_environment(directory):
        yield directory


@pytest.fixture(scope="module")
def shared_session(temporary):
    with spark_session() as session:
        yield session


@pytest.fixture
def spark(shared_session, temporary):
    """A session with two executors of one core; afterwards no process of a place and no file is left."""
    yield shared_session
    eventually(lambda: not list(temporary.glob("tfdist-*")), "the directories of places")
    eventually(lambda: not launched_processes(temporary), "the processes of places")


def test_the_weights_are_those_of_tfdist_run(spark, reference, tmp_path):
    values = on_spark(functions.train, str(tmp_path), workers=2)
    assert [steps for _, steps in values] == [2 * functions.STEPS_OF_EPOCH] * 2
    for weights, _ in values:
        assert_identical(weights, reference)
    assert np.abs(reference[0]).max() > 0


@pytest.mark.long
def test_values_by_rank_and_the_output_of_workers(spark):
    assert on_spark(functions.task_and_threads, 10, workers=2) == [("worker", 0, "1"), ("worker", 10, "1")]
    assert on_spark(functions.task_and_threads, 10, spark=spark, workers=1) == [("worker", 0, "1")]
    logs = (work_directory() / spark.sparkContext.applicationId).glob("*/stderr")
    lines = [line for log in logs for line in log.read_text().splitlines()]
    assert {"[0] task 0", "[1] task 1"} <= set(lines)


@pytest.mark.long
def test_a_chief_alone_returns_a_value(spark):
    assert on_spark(functions.task_and_threads, 10, workers=2, chief=True) == [("chief", 0, "1")]


@pytest.mark.long
def test_the_error_has_the_rank_and_the_users_lines(spark):
    with pytest.raises(WorkerError, match=r"Worker 1 of 2 failed: KeyError: 'no such column'") as caught:
        on_spark(functions.fail_in_one, "no such column", workers=2)
    assert caught.value.rank == 1 and "raise KeyError(message)" in caught.value.traceback


@pytest.mark.long
def test_too_few_slots_are_counted(spark):
    with pytest.raises(TimeoutError, match=r"Received: 2, of local-cluster\[.* Expected: workers=3, all at the same"):
        on_spark(functions.task_and_threads, 1, workers=3, start_timeout_seconds=1)


@pytest.mark.long
def test_slots_of_other_jobs_are_waited_for(spark):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        busy = pool.submit(lambda: spark.sparkContext.parallelize([0], 1).map(lambda _: time.sleep(12)).count())
        eventually(lambda: spark.sparkContext.statusTracker().getActiveStageIds(), "another job")
        with pytest.raises(TimeoutError, match=r"too few free slots .* Received: 2 slots of local-cluster"):
            on_spark(functions.task_and_threads, 1, workers=2, start_timeout_seconds=2)
        assert on_spark(functions.task_and_threads, 1, workers=2)[1] == ("worker", 1, "1")
        busy.result(60)


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, EXECUTOR])
def test_a_killed_process_changes_no_weight(spark, reference, tmp_path, victim, capfd):
    values = on_spark(functions.train, str(tmp_path), victim, workers=2, max_restarts=1)
    assert (tmp_path / "killed").exists()
    assert all(steps < 2 * functions.STEPS_OF_EPOCH for _, steps in values), "resumed"
    for weights, _ in values:
        assert_identical(weights, reference)
    assert ("restarting in new places (0 restarts left)" in capfd.readouterr().err) == (victim == EXECUTOR)


@pytest.mark.long
def test_a_lost_executor_ends_the_call(spark):
    start = time.monotonic()
    with pytest.raises(WorkerError, match=r"no restart is left. Received: a place was lost: ExecutorLostFailure"):
        on_spark(functions.lose_place, EXECUTOR, workers=2)
    assert time.monotonic() - start < 40, "without the 60 s that worker 0 would wait"


@pytest.mark.long
def test_a_cancelled_job_ends_the_call(spark, tmp_path):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        call = pool.submit(on_spark, functions.wait_for_signal, str(tmp_path), spark=spark, workers=2, max_restarts=1)
        eventually(lambda: len(list(tmp_path.glob("started-*"))) == 2, "started")
        spark.sparkContext.cancelAllJobs()
        with pytest.raises(WorkerError, match=r"Spark has ended the job of the workers: .*cancelled"):
            call.result(60)
    eventually(lambda: len(list(tmp_path.glob("saved-*"))) == 2, "saved")


@pytest.mark.long
def test_an_executor_without_tfdist_is_an_error(spark, monkeypatch):
    import tfdist.launch.engines.on_spark as module

    def without_tfdist(call):
        def run(_):
            raise ModuleNotFoundError("No module named 'tfdist'")

        return run

    monkeypatch.setattr(module, "run_barrier_task", without_tfdist)
    with pytest.raises(ImportError, match="An executor of Spark cannot import tfdist"):
        on_spark(functions.task_and_threads, 1, workers=2)


@pytest.mark.long
def test_an_interrupt_lets_the_function_save(spark, tmp_path):
    def interrupt():
        eventually(lambda: len(list(tmp_path.glob("started-*"))) == 2, "started")
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        on_spark(functions.wait_for_signal, str(tmp_path), workers=2)
    thread.join()
    eventually(lambda: len(list(tmp_path.glob("saved-*"))) == 2, "saved")


DRIVER = """
import sys
import local_spark, engine_functions
from tfdist.launch import on_spark
with local_spark.spark_session(sys.argv[1]):
    on_spark(engine_functions.wait_for_signal, sys.argv[2], workers=2)
"""


@pytest.mark.long
@pytest.mark.parametrize("master", [CLUSTER, "local[2]"])
def test_the_places_of_a_killed_driver_end(temporary, tmp_path, master):
    logs = set(work_directory().glob("*"))
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, master, str(tmp_path)])
    try:
        eventually(lambda: len(list(tmp_path.glob("started-*"))) == 2, "started", 120)
    finally:
        driver.kill()
        driver.wait()
    eventually(lambda: len(list(tmp_path.glob("saved-*"))) == 2, "saved")
    eventually(lambda: not list(temporary.glob("tfdist-*")), "the directories of places")
    eventually(lambda: not launched_processes(temporary), "the processes of places")
    for directory in set(work_directory().glob("*")) - logs:  # Spark's, of a driver that could not remove them
        shutil.rmtree(directory, ignore_errors=True)


def test_other_sessions_are_refused():
    with pytest.raises(TypeError, match=r"`spark` is not a Spark session. Received: spark='spark://a:1'"):
        on_spark(functions.task_and_threads, 1, spark="spark://a:1", workers=1)


def test_a_session_of_spark_connect_is_refused():
    remote = type("SparkSession", (), {"__module__": "pyspark.sql.connect.session"})()
    with pytest.raises(ValueError, match=r"`on_spark` cannot use Spark Connect"):
        on_spark(functions.task_and_threads, 1, spark=remote, workers=1)


def test_executors_that_come_and_go_are_refused(spark, monkeypatch):
    dynamic = type(spark.sparkContext.getConf())(loadDefaults=False).set("spark.dynamicAllocation.enabled", "true")
    monkeypatch.setattr(type(spark.sparkContext), "getConf", lambda self: dynamic)
    with pytest.raises(ValueError, match=r"Received: spark.dynamicAllocation.enabled=true"):
        on_spark(functions.task_and_threads, 1, workers=1)
