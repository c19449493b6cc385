"""Spark on this machine, for tests: a session, and what its processes leave."""

import contextlib
import os
import shutil
import sys
from pathlib import Path

import pytest
from engine_runs import engine_environment

CLUSTER = "local-cluster[2,1,1024]"


def require_spark():
    """Skips a test, or a module, where Spark cannot run."""
    pytest.importorskip("pyspark", reason="needs the extra `spark`")
    pytest.importorskip("psutil")
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        pytest.skip("needs Java", allow_module_level=True)


def spark_environment(temporary, *paths):
    """Gives this process, and the executors that it starts, the environment of a test."""
    return engine_environment(temporary, *paths, PYSPARK_PYTHON=sys.executable, SPARK_LOCAL_IP="127.0.0.1")


@contextlib.contextmanager
def spark_session(master=CLUSTER, **config):
    """Yields a session; afterwards Java has ended, and its directories have gone."""
    import signal

    import pyspark
    from pyspark.sql import SparkSession

    handler = signal.getsignal(signal.SIGINT)
    builder = SparkSession.builder.master(master).config("spark.ui.enabled", "false")
    builder = builder.config("spark.sql.shuffle.partitions", "2").config("spark.driver.memory", "512m")
    for name, value in config.items():
        builder = builder.config(f"spark.{name.replace('_', '.')}", value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    application = session.sparkContext.applicationId
    try:
        yield session
    finally:
        session.stop()
        gateway, pyspark.SparkContext._gateway, pyspark.SparkContext._jvm = pyspark.SparkContext._gateway, None, None
        gateway.shutdown()
        gateway.proc.stdin.close()
        gateway.proc.wait(60)
        signal.signal(signal.SIGINT, handler)
        shutil.rmtree(work_directory() / application, ignore_errors=True)
        with contextlib.suppress(OSError):
            work_directory().rmdir()


def work_directory():
    """Where the executors of a local cluster write their logs."""
    import pyspark

    return Path(os.environ.get("SPARK_HOME", Path(pyspark.__file__).parent)) / "work"
