"""Clusters in miniature: every task is a thread of the test's process, on loopback, and looks at no machine."""

import json
import threading
from collections.abc import Callable

import pytest

from tfdist.cluster import ClusterConfig, ClusterSpec, Task
from tfdist.doctor import link
from tfdist.doctor.examination import examine
from tfdist.doctor.situation import Situation
from tfdist.launch.ports import ReservedPorts

LIMIT_SECONDS = 40


class Tasks:
    """The results of `examine`, by task, of those that are started."""

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

    def situation(self, task, **facts):
        job, index = task.split()
        config = ClusterConfig(ClusterSpec(facts.pop("jobs", self.jobs)), Task(job, int(index)), source="TF_CONFIG")
        return Situation(facts.pop("environ", {}), cores=1, config=config, **facts)

    def start(self, task, *, timeout=20.0, checks=(), clock=None, **facts):
        options = {} if clock is None else {"clock": clock}
        situation = self.situation(task, **facts)

        def run():
            self._results[task] = examine(
                situation, timeout_seconds=timeout, say=self.said.append, checks=checks, **options
            )

        # Daemons: one that hangs must not keep the tests from ending.
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
    """Makes clusters whose measurements are as short as can be."""
    monkeypatch.setattr(link, "_ENOUGH_SECONDS", 0.002)
    monkeypatch.setattr(link, "_ECHOES", 5)
    return Tasks


@pytest.fixture
def found():
    """Returns the findings of a check in a report."""

    def find(report, check, *, level=None):
        return [x for x in report.findings if x.check == check and level in (None, x.level)]

    return find
