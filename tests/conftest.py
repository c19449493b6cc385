"""Fixtures of all tests. TensorFlow logs errors only, in this process and in those that it starts."""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import framework_imports
import graph_optimizations
import pytest

framework_imports.install()
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

_TESTS = Path(__file__).parent
# Their tests check a run that an earlier file starts. At the same time they would only wait for another test process.
_LAST = {
    _TESTS / "elastic" / "test_elastic_local_updates.py",
    _TESTS / "parameter_server" / "test_cluster_training.py",
    _TESTS / "parameter_server" / "test_federated_averaging.py",
    _TESTS / "strategies" / "test_elastic_on_workers.py",
    _TESTS / "strategies" / "test_guards_on_workers.py",
    _TESTS / "strategies" / "test_multi_worker_strategy.py",
    _TESTS / "strategies" / "test_shared_paths.py",
}
# Directories whose tests mostly wait, for processes without TensorFlow and for limits of seconds.
_WAITING = {_TESTS / name for name in ("cluster", "exchange", "launch", "membership", "transport")}
# How often Grappler optimizes graphs, by directory or file; once by default. The directories compare trainings with
# themselves, and look at files and messages; the first files are the ones of their directories that are optimized as
# others are, the last compare the bits of several processes with those of one.
_GRAPPLER = {
    **dict.fromkeys(
        ("any_strategy", "callbacks", "data_position", "pipeline", "recovery", "sharded_state", "tensor_parallel"),
        "off",
    ),
    **dict.fromkeys(("test_pipeline_parity.py", "test_tensor_parallel.py"), "once"),
    **dict.fromkeys(("test_stages.py", "test_sharded_stages.py", "test_stock_recovery.py"), "twice"),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spreads the files that wait evenly over the others, and moves those whose run another file starts to the end.

    So the processes do not wait at the same time, and while one waits the others use its core.
    """
    position: dict[Path, float] = {}
    files = [path for path in dict.fromkeys(item.path for item in items) if path not in _LAST]
    for waits in (False, True):
        of_a_kind = [path for path in files if _WAITING.isdisjoint(path.parents) != waits]
        position |= {path: index / len(of_a_kind) for index, path in enumerate(of_a_kind)}
    items.sort(key=lambda item: position.get(item.path, 1.0))


@pytest.fixture(scope="module", autouse=True)
def small_heap() -> None:
    """Excludes the objects of earlier modules (TensorFlow, its functions, finished tests) from garbage collection.

    Otherwise each collection visits all of them, which takes a second at the end of the suite, and tests collect after
    every training.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def graph_passes(request: pytest.FixtureRequest) -> Iterator[None]:
    """Optimizes the graphs of a file as often as its table says: see `graph_optimizations`."""
    passes = _GRAPPLER.get(request.path.name) or _GRAPPLER.get(request.path.parent.name)
    if passes is None:
        yield
        return
    with graph_optimizations.grappler(passes):
        yield


@pytest.fixture
def unpatched() -> Iterator[None]:
    """Begins a test without what tfdist replaces in TensorFlow and Keras; what the test installs is undone after it.

    Request it before `monkeypatch`, which must end first: it would put stock attributes back where tfdist's belong.
    """
    from undone_patches import without_patches

    with without_patches():
        yield


@pytest.fixture(autouse=True)
def no_late_signal() -> Iterator[None]:
    """Prevents a signal that arrived too late to end the `fit` of one test from ending that of the next."""
    yield
    if preemption := sys.modules.get("tfdist.recovery.preemption"):
        preemption.PreemptionHandler._pending_since = None


@pytest.fixture(scope="session")
def cpus() -> list[str]:
    """Four logical CPU devices. Every test that uses TensorFlow in this process requests this fixture."""
    import tensorflow as tf

    graph_optimizations.install()
    physical = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(physical, [tf.config.LogicalDeviceConfiguration()] * 4)
    return [f"CPU:{index}" for index in range(len(tf.config.list_logical_devices("CPU")))]
