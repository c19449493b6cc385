"""`on_spark` on a local cluster: the contract of engines, jobs, sessions that are refused; nothing is left."""

import concurrent.futures
import shutil
import time

import engine_functions as functions
import pytest
from engine_contract import EngineContract, both
from engine_runs import eventually, launched_processes
from local_spark import (
    CLUSTER,
    require_spark,
    spark_environment,
    spark_session,
    work_directory,
)

from tfdist.launch import WorkerError, on_spark

require_spark()


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


@pytest.fixture
def engine(spark):
    return spark


class TestOnSpark(EngineContract):
    """A place is an executor. The Python worker in it is generation 3, and that one's daemon generation 4."""

    call = staticmethod(on_spark)
    owner = 5
    places_that_start_again = ()  # a barrier stage ends with its first task
    too_few = r"Received: 2, of local-cluster\[.* Expected: workers=3, all at the same"
    lost = "a place was lost: ExecutorLostFailure"
    lost_seconds = 40
    returns_after_places = False
    driver_context = '__import__("local_spark").spark_session(sys.argv[1])'

    def one_place(self, engine):
        return {"spark": engine}

    def printed(self, engine, capfd):
        logs = (work_directory() / engine.sparkContext.applicationId).glob("*/stderr")
        return [line for log in logs for line in log.read_text().splitlines()]

    @pytest.mark.long
    @pytest.mark.parametrize("master", [CLUSTER, "local[2]"])
    def test_the_places_of_a_killed_driver_end(self, temporary, tmp_path, master):
        logs = set(work_directory().glob("*"))
        self.kill_driver(master, tmp_path)
        eventually(lambda: not list(temporary.glob("tfdist-*")), "the directories of places")
        eventually(lambda: not launched_processes(temporary), "the processes of places")
        for directory in set(work_directory().glob("*")) - logs:  # Spark's, of a driver that could not remove them
            shutil.rmtree(directory, ignore_errors=True)


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
def test_a_cancelled_job_ends_the_call(spark, tmp_path):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        call = pool.submit(on_spark, functions.wait_for_signal, str(tmp_path), spark=spark, workers=2, max_restarts=1)
        eventually(both(tmp_path, "started"), "started")
        spark.sparkContext.cancelAllJobs()
        with pytest.raises(WorkerError, match=r"Spark has ended the job of the workers: .*cancelled"):
            call.result(60)
    eventually(both(tmp_path, "saved"), "saved")


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
