"""Checks of a machine's resources, and what all checks have in common."""

import resource
import subprocess
import sys

import pytest
from machines import context, one, write

from tfdist.doctor import resource_checks as resources
from tfdist.doctor.check_context import workers_on_own_host
from tfdist.doctor.check_runner import MACHINE_CHECKS, run_machine_checks
from tfdist.doctor.library_checks import START_TIMEOUT_SECONDS, check_tensorflow_start


@pytest.mark.parametrize(
    ("cores", "workers", "level"), [(2, 1, "ok"), (2, 2, "ok"), (2, 3, "warning"), (1, 2, "warning")]
)
def test_cores(cores, workers, level):
    finding = one(resources.check_cores(context(cores=cores, workers=workers)))
    assert finding.level == level and f"{cores} usable" in finding.found


def test_workers_of_a_host_are_counted_by_its_name():
    config = context("a:1", "B:1", "b:2", "[::1]:1", task=1).config
    assert workers_on_own_host(config) == 2


MEMORY = {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 8000000 kB\n", "proc/self/cgroup": "0::/a/b\n"}
V1 = {**MEMORY, "proc/self/cgroup": "5:cpu,memory:/c\n4:cpu:/d\n"}


@pytest.mark.parametrize(
    ("files", "available"),
    [
        ({}, None),
        (MEMORY, 8_192_000_000),
        ({**MEMORY, "sys/fs/cgroup/a/memory.max": "5000", "sys/fs/cgroup/a/memory.current": "3000"}, 2000),
        ({**MEMORY, "sys/fs/cgroup/memory.max": "max", "sys/fs/cgroup/memory.current": "3000"}, 8_192_000_000),
        (
            {
                **MEMORY,
                "sys/fs/cgroup/a/b/memory.max": "5000",
                "sys/fs/cgroup/a/b/memory.current": "3000",
                "sys/fs/cgroup/a/b/memory.stat": "anon 1\ninactive_file 1000\n",
            },
            3000,
        ),
        (
            {
                **V1,
                "sys/fs/cgroup/memory/c/memory.limit_in_bytes": "5000",
                "sys/fs/cgroup/memory/c/memory.usage_in_bytes": "4000",
                "sys/fs/cgroup/memory/c/memory.stat": "total_inactive_file 500\n",
            },
            1500,
        ),
        ({**MEMORY, "sys/fs/cgroup/a/memory.max": "5000", "sys/fs/cgroup/a/memory.current": "6000"}, 0),
    ],
    ids=["nothing known", "free", "v2 parent", "v2 no limit", "v2 cache", "v1", "over the limit"],
)
def test_available_memory(tmp_path, files, available):
    assert resources.available_memory_bytes(write(tmp_path, files)) == available


def test_memory(tmp_path):
    root = write(tmp_path, MEMORY)
    assert one(resources.check_memory(context(root=root, workers=2))).level == "ok"
    finding = one(resources.check_memory(context(root=root, workers=2, parameters=200_000_000)))
    assert finding.level == "warning" and "9.6 GB for 2 workers with 200M parameters" in finding.expected
    assert "not known" in one(resources.check_memory(context(root=root / "empty"))).found


@pytest.mark.parametrize(
    ("limits", "tasks", "level", "remedy"),
    [
        ((4096, 4096), 2, "ok", ""),
        ((256, 4096), 2, "warning", "ulimit -n 1024"),
        ((1024, 4096), 100, "warning", "ulimit -n 3232"),
        ((1024, 1024), 100, "warning", "hard limit (1024)"),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), 100, "ok", ""),
    ],
)
def test_open_files(monkeypatch, limits, tasks, level, remedy):
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits)
    finding = one(resources.check_open_files(context(*(f"h{i}:1" for i in range(tasks)))))
    assert finding.level == level and remedy in finding.remedy


def test_shared_memory(tmp_path, monkeypatch):
    assert "only GPUs need it" in one(resources.check_shared_memory(context(root=tmp_path))).found
    write(tmp_path, {"dev/nvidia0": ""})
    finding = one(resources.check_shared_memory(context(root=tmp_path)))
    assert finding.level == "warning" and "/dev/shm: No such file" in finding.found and "--shm-size" in finding.remedy
    (tmp_path / "dev/shm").mkdir()
    assert one(resources.check_shared_memory(context(root=tmp_path))).level == "ok"
    monkeypatch.setattr(resources, "_MIN_SHARED_BYTES", 10**18)
    assert one(resources.check_shared_memory(context(root=tmp_path))).level == "warning"


def test_check_that_raises_is_a_finding():
    def check_nothing(context):
        raise PermissionError("not for you")

    finding = one(run_machine_checks(context("a:1", "b:1", task=1), [check_nothing]))
    assert (finding.check, finding.level, finding.task) == ("nothing", "warning", "worker 1")
    assert "not for you" in finding.found
    assert check_tensorflow_start in MACHINE_CHECKS and START_TIMEOUT_SECONDS < 300


def test_package_does_not_import_tensorflow():
    modules = "sys, tfdist.doctor.local_cluster, tfdist.launch.cli.main"
    code = f"import {modules}; print({{'tensorflow', 'numpy'}} & {{*sys.modules}})"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "set()\n"
