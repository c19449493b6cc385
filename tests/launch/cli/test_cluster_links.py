"""The links of a cluster whose tasks are threads of this process."""

import threading

import pytest

from tfdist.cluster import ClusterConfig, ClusterSpec, Task
from tfdist.doctor import link_measurement
from tfdist.launch.cli.plan_execution import measured_link
from tfdist.utils.argument_checks import UsageError
from tfdist.utils.cores_and_ports import ReservedPorts


@pytest.fixture
def workers(monkeypatch):
    monkeypatch.setattr(link_measurement, "_MIN_SECONDS", 0.002)
    monkeypatch.setattr(link_measurement, "_ECHOES", 5)
    with ReservedPorts(2) as reserved:
        return [f"127.0.0.1:{port}" for port in reserved.ports]


def task(workers, index):
    return ClusterConfig(ClusterSpec({"worker": workers}), Task("worker", index), source="TF_CONFIG")


def test_the_first_task_learns_the_slowest_link_and_the_others_end(workers):
    found, said = {}, []
    threads = [
        threading.Thread(
            target=lambda index=index: found.update(
                {index: measured_link(task(workers, index), {}, 1, 20.0, said.append)}
            ),
            daemon=True,
        )
        for index in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    assert found[1] is None
    assert found[0].bytes_per_second > 1e6 and 0 < found[0].latency_seconds < 1


def test_a_task_that_is_missing(workers, monkeypatch):
    monkeypatch.setattr("tfdist.doctor.check_runner._LAST_TRY_SECONDS", 0.1)
    with pytest.raises(UsageError, match="The links between the tasks cannot be measured. Received: worker 1 at"):
        measured_link(task(workers, 0), {}, 1, 0.2, print)
