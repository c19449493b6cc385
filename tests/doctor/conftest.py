"""Clusters whose tasks are threads of the test's process, on loopback, without checks of the machine."""

import json
import threading
from collections.abc import Callable

import pytest

from tfdist.cluster import ClusterConfig, ClusterSpec, Task
from tfdist.doctor import link_measurement as link
from tfdist.doctor.check_context import CheckContext
from tfdist.doctor.check_runner import run_checks
from tfdist.utils.cores_and_ports import ReservedPorts

LIMIT_SECONDS = 120


class Tasks:
    """Starts tasks, and collects the result of `run_checks` for each."""

    def __init__(self, jobs=(("worker", 2),)):
        with ReservedPorts(sum(count for _, count in jobs)) as reserved:
            ports = list(reserved.ports)
        self.jobs = {job: [f"127.0.0.1:{ports.pop()}" for _ in range(count)] for job, count in jobs}
        self.said = []
        self._results, self._threads = {}, []

    def address(self, task):
        job, index = task.split()
        return self.jobs[job][int(index)]

    def port(self, task):
        return int(self.address(task).rpartition(":")[2])

    def context(self, task, **facts):
        job, index = task.split()
        config = ClusterConfig(ClusterSpec(facts.pop("jobs", self.jobs)), Task(job, int(index)), source="TF_CONFIG")
        return CheckContext(facts.pop("environ", {}), cores=1, config=config, **facts)

    def start(self, task, *, timeout=20.0, checks=(), clock=None, **facts):
        options = {} if clock is None else {"clock": clock}
        context = self.context(task, **facts)

        def run():
            self._results[task] = run_checks(
                context, timeout_seconds=timeout, say=self.said.append, checks=checks, **options
            )

        # Daemons: a task that hangs must not keep the tests from ending.
        thread = threading.Thread(target=run, name=task, daemon=True)
        self._threads.append(thread)
        thread.start()
        return self

    def results(self) -> dict:
        for thread in self._threads:
            thread.join(LIMIT_SECONDS)
            assert not thread.is_alive(), f"{thread.name} did not end"
        json.dumps([result.to_json() for result in self._results.values() if hasattr(result, "to_json")])
        return self._results


@pytest.fixture
def tasks(monkeypatch) -> Callable[..., Tasks]:
    """Creates clusters whose measurements are short."""
    monkeypatch.setattr(link, "_MIN_SECONDS", 0.002)
    monkeypatch.setattr(link, "_ECHOES", 5)
    return Tasks


@pytest.fixture
def found():
    """Returns the findings of a check in a report."""

    def find(report, check, *, level=None):
        return [x for x in report.findings if x.check == check and level in (None, x.level)]

    return find
