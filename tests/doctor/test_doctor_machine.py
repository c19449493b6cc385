"""What is found on a machine: each check against a machine that has the trouble and one that has not."""

import contextlib
import errno
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tfdist.cluster import ClusterConfig, ClusterSpec, Task
from tfdist.doctor import checkpoint_directory, libraries, names, own_port, resources, tensorflow_start
from tfdist.doctor.checkpoint_directory import check_checkpoints, marked, sees_marker
from tfdist.doctor.finding import Finding
from tfdist.doctor.machine import CHECKS, check_machine
from tfdist.doctor.proxy import check_proxy
from tfdist.doctor.situation import Situation, workers_on_own_host
from tfdist.doctor.tensorflow_start import check_tensorflow_start

GB = 10**9


def situation(*addresses, task=0, **facts):
    config = ClusterConfig(ClusterSpec({"worker": addresses}), Task("worker", task)) if addresses else None
    return Situation(facts.pop("environ", {}), **{"cores": 2, "config": config, **facts})


def write(root, files):
    for path, content in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(content)
    return root


def one(findings) -> Finding:
    [finding] = findings
    return finding


@pytest.mark.parametrize(
    ("version", "level"), [((3, 11, 2), "ok"), ((3, 13, 0), "ok"), ((3, 10, 9), "error"), ((3, 14, 0), "error")]
)
def test_python(monkeypatch, version, level):
    monkeypatch.setattr(sys, "version_info", version)
    assert one(libraries.check_python(situation())).level == level


@pytest.mark.parametrize(
    ("versions", "levels"),
    [
        ({"tensorflow": "2.21.0", "keras": "3.15.1"}, ["ok", "ok"]),
        ({"tensorflow": "2.21.0rc1", "keras": "3.15.0.dev3"}, ["ok", "ok"]),
        ({"tensorflow": "2.20.0", "keras": "3.16.0"}, ["warning", "warning"]),
        ({"tensorflow": "nonsense", "keras": "3.15.1"}, ["warning", "ok"]),
    ],
)
def test_tested_versions(monkeypatch, versions, levels):
    monkeypatch.setattr(libraries, "installed_versions", lambda: versions)
    found = {x.check: x for x in libraries.check_libraries(situation())}
    assert [found["tensorflow"].level, found["keras"].level] == levels
    assert found["safetensors"].level == "ok"
    if levels[0] == "warning":
        assert 'pip install "tensorflow>=2.21,<2.22"' in found["tensorflow"].remedy


def test_missing_library(monkeypatch):
    monkeypatch.setattr(libraries, "installed_versions", dict)
    monkeypatch.setattr(libraries, "_installed", lambda name: None)
    findings = libraries.check_libraries(situation())
    assert {x.level for x in findings} == {"error"} and {x.found for x in findings} == {"not installed"}
    assert libraries.own_versions()["tensorflow"] == "not installed"


def start(program, root=None, limit_seconds=30, **environ):
    environ = {"PATH": os.environ["PATH"], **environ}
    machine = situation(environ=environ, **({} if root is None else {"root": root}))
    return {x.check: x for x in check_tensorflow_start(machine, program=program, limit_seconds=limit_seconds)}


def says(**changes):
    said = {"seconds": 1.0, "bytes": GB, "backend": "tensorflow", "devices": [["CPU", ""]], "symbols": 3, "missing": ""}
    return f"import json; print('noise'); print(json.dumps({ {**said, **changes}!r}))"


def test_a_start_that_is_well(tmp_path):
    found = start(says(devices=[["CPU", ""], ["GPU", "A100"], ["GPU", "A100"]]), root=tmp_path)
    assert {x.level for x in found.values()} == {"ok"}
    assert found["devices"].found == "1 CPU, 2 GPU (A100)"
    assert found["tensorflow start"].found == "1.0 s to import, 1.0 GB of memory"


@pytest.mark.parametrize(
    ("program", "found", "remedy"),
    [
        ("import sys; sys.exit('no libcudart')", "ended with exit code 1: no libcudart", "pip check"),
        ("import no_such_thing", "No module named 'no_such_thing'", "pip check"),
        ("import os; os.kill(os.getpid(), 4)", "ended by SIGILL", "newer processors"),
        ("import os; os.kill(os.getpid(), 9)", "ended by SIGKILL", "dmesg"),
        ("import os; os.kill(os.getpid(), 11)", "ended by SIGSEGV", "driver"),
        ("print('[]')", "ended with exit code 0", "pip check"),
        ("pass", "ended with exit code 0", "pip check"),
    ],
)
def test_a_start_that_crashes(program, found, remedy):
    finding = one(start(program).values())
    assert (finding.check, finding.level) == ("tensorflow start", "error")
    assert found in finding.found and remedy in finding.remedy


def test_a_start_that_hangs(tmp_path):
    """With a child of its own, which is ended too."""
    program = (
        "import os, subprocess, sys, time, pathlib\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(child.pid))\n"
        "print('loading', file=sys.stderr, flush=True); time.sleep(600)"
    )
    finding = one(start(program, limit_seconds=1.5).values())
    assert finding.level == "error" and finding.found == "no end after 1.5 s (loading)"
    stat, end = Path("/proc", (tmp_path / "pid").read_text(), "stat"), time.monotonic() + 20
    with contextlib.suppress(FileNotFoundError):  # reaped
        while stat.read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < end, "it lives on"
            time.sleep(0.01)


def test_the_child_sees_no_cluster():
    found = start("import os, sys; sys.exit(os.environ.get('TF_CONFIG', 'none'))", TF_CONFIG="a cluster")
    assert "exit code 1: none" in one(found.values()).found


def test_another_backend_and_missing_symbols(tmp_path):
    found = start(says(backend="jax", missing="tfdist needs 'x:y' (a reason)"), root=tmp_path)
    assert found["keras backend"].level == "error" and "KERAS_BACKEND=tensorflow" in found["keras backend"].remedy
    assert found["private symbols"].level == "error" and "'x:y'" in found["private symbols"].found


def test_gpus_that_tensorflow_does_not_see(tmp_path):
    write(tmp_path, {"dev/nvidia0": "", "dev/nvidia1": "", "dev/nvidiactl": ""})
    finding = start(says(), root=tmp_path)["devices"]
    assert finding.level == "warning" and "this machine has 2 NVIDIA GPU(s)" in finding.found
    assert start(says(devices=[["GPU", ""]]), root=tmp_path)["devices"].level == "ok"


@pytest.mark.parametrize(
    ("cores", "workers", "level"), [(2, 1, "ok"), (2, 2, "ok"), (2, 3, "warning"), (1, 2, "warning")]
)
def test_cores(cores, workers, level):
    finding = one(resources.check_cores(situation(cores=cores, workers=workers)))
    assert finding.level == level and f"{cores} usable" in finding.found


def test_workers_of_a_host_are_counted_by_its_name():
    config = situation("a:1", "B:1", "b:2", "[::1]:1", task=1).config
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
    assert one(resources.check_memory(situation(root=root, workers=2))).level == "ok"
    finding = one(resources.check_memory(situation(root=root, workers=2, parameters=200_000_000)))
    assert finding.level == "warning" and "9.6 GB for 2 workers with 200M parameters" in finding.expected
    assert "not known" in one(resources.check_memory(situation(root=root / "empty"))).found


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
    finding = one(resources.check_open_files(situation(*(f"h{i}:1" for i in range(tasks)))))
    assert finding.level == level and remedy in finding.remedy


def test_shared_memory(tmp_path, monkeypatch):
    assert "only GPUs need it" in one(resources.check_shared_memory(situation(root=tmp_path))).found
    write(tmp_path, {"dev/nvidia0": ""})
    finding = one(resources.check_shared_memory(situation(root=tmp_path)))
    assert finding.level == "warning" and "/dev/shm: No such file" in finding.found and "--shm-size" in finding.remedy
    (tmp_path / "dev/shm").mkdir()
    assert one(resources.check_shared_memory(situation(root=tmp_path))).level == "ok"
    monkeypatch.setattr(resources, "_LEAST_SHARED_BYTES", 10**18)
    assert one(resources.check_shared_memory(situation(root=tmp_path))).level == "warning"


@pytest.mark.parametrize(
    ("environ", "level"),
    [
        ({}, "ok"),
        ({"HTTP_PROXY": "http://p:1"}, "ok"),  # gRPC reads lower case only
        ({"http_proxy": "http://p:1"}, "error"),
        ({"https_proxy": "http://p:1"}, "error"),
        ({"grpc_proxy": "http://p:1", "no_proxy": "node0,node1"}, "ok"),
        ({"grpc_proxy": "", "http_proxy": "http://p:1"}, "ok"),
        ({"http_proxy": "http://p:1", "no_proxy": "node0"}, "error"),
        ({"http_proxy": "http://p:1", "no_grpc_proxy": "node0", "no_proxy": "node0,node1"}, "error"),
        ({"http_proxy": "http://p:1", "no_proxy": "E0, e1"}, "ok"),
    ],
)
def test_proxy(environ, level):
    assert one(check_proxy(situation("node0:1", "node1:1", environ=environ))).level == level


def test_proxy_of_a_machine_alone_and_its_password():
    finding = one(check_proxy(situation(environ={"http_proxy": "http://me:secret@p:1"})))
    assert finding.level == "warning" and "secret" not in str(finding)
    environ = {"http_proxy": "http://me:secret@p:1", "no_proxy": "10.0.0.0/8"}
    finding = one(check_proxy(situation("10.1.0.1:1", "11.1.0.1:1", environ=environ)))
    assert "through the proxy to 11.1.0.1" in finding.found and "no_grpc_proxy=10.1.0.1,11.1.0.1" in finding.remedy


def resolving(monkeypatch, table):
    def getaddrinfo(host, *arguments, **options):
        if host not in table:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in table[host]]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


def test_own_name(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "me")
    resolving(monkeypatch, {"me": ["10.0.0.1"]})
    assert one(names.check_own_name(situation())).found == "me is 10.0.0.1"
    resolving(monkeypatch, {})
    finding = one(names.check_own_name(situation()))
    assert finding.level == "warning" and "'<address> me' to /etc/hosts" in finding.remedy


@pytest.mark.parametrize(
    ("host", "other", "level", "found"),
    [
        ("own", "far", "ok", "own is 127.0.0.9, 8.8.8.8"),
        ("loop", "loop", "ok", "loop is 127.0.0.1"),
        ("loop", "far", "error", "this host's loopback"),
        ("gone", "far", "error", "Name or service not known"),
        ("far", "own", "warning", "8.8.8.8, which this machine does not have"),
    ],
)
def test_own_address(monkeypatch, host, other, level, found):
    monkeypatch.setattr(names, "is_own", lambda address: address != "8.8.8.8")
    monkeypatch.setattr(names, "_is_loopback", lambda address: address == "127.0.0.1")
    resolving(monkeypatch, {"own": ["127.0.0.9", "8.8.8.8"], "far": ["8.8.8.8"], "loop": ["127.0.0.1"]})
    finding = one(names.check_own_address(situation(f"{host}:1", f"{other}:2")))
    assert finding.level == level and found in finding.found


def test_addresses_are_own_where_they_can_be_bound():
    assert names.is_own("127.0.0.1") and not names.is_own("192.0.2.1")
    with pytest.raises(OSError, match="not a name"):
        names.addresses_of("a" * 300)


def test_own_port_in_the_range_of_linux(tmp_path):
    root = write(tmp_path, {"proc/sys/net/ipv4/ip_local_port_range": "32768\t60999\n"})
    machine = situation("a:40000", "b:1", root=root)
    assert own_port.free_port(machine, "a", 40000).level == "warning"
    assert own_port.free_port(machine, "a", 2222).level == "ok"
    assert own_port.free_port(machine, "127.0.0.1", 40000).level == "ok"
    started = situation("a:40000", "b:1", root=root, environ={"TFDIST_RUN_ID": "1"})
    assert own_port.free_port(started, "a", 40000).level == "ok"
    assert own_port.free_port(situation("a:40000", root=root / "unknown"), "a", 40000).level == "ok"


def test_who_holds_a_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert any(f"process {os.getpid()} (" in holder for holder in own_port.holders_of(port))
        with socket.create_connection(("127.0.0.1", port)) as client:
            assert own_port.holders_of(client.getsockname()[1]) == []  # connected, not listening


def test_a_port_of_another_user(monkeypatch):
    monkeypatch.setattr(own_port, "holders_of", lambda port, root: [])
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    finding = own_port.taken_port(situation(), 2222, OSError(errno.EADDRINUSE, "long story"))
    assert finding.found == "2222: Address already in use" and "sudo ss -ltnp 'sport = :2222'" in finding.remedy


def test_a_good_directory(tmp_path):
    for directory in (tmp_path, tmp_path / "a" / "b"):
        speed, room = check_checkpoints(situation(checkpoints=directory, parameters=1000))
        assert (speed.level, room.level) == ("ok", "ok") and "written and flushed" in speed.found
        assert ("is to be made in" in speed.found) == (directory != tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert check_checkpoints(situation()) == []


@pytest.mark.parametrize(
    ("name", "found"), [("gs://bucket/a", "is a URL"), ("file/below", "file is a file"), ("file", "file is a file")]
)
def test_no_directory(tmp_path, monkeypatch, name, found):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    finding = one(check_checkpoints(situation(checkpoints=Path(name))))
    assert finding.level == "error" and found in finding.found


@pytest.mark.parametrize("call", ["os.fsync", "os.rename", "tempfile.mkdtemp"])
def test_a_directory_that_cannot_be_written(tmp_path, monkeypatch, call):
    def refuse(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(call, refuse)
    finding = one(check_checkpoints(situation(checkpoints=tmp_path)))
    assert finding.level == "error" and "No space left on device" in finding.found
    assert list(tmp_path.iterdir()) == []


def test_room_for_what_is_kept_and_one_more(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    fits, too_many = (int(free * share / (12 * 4)) for share in (0.8, 1.2))
    assert [x.level for x in check_checkpoints(situation(checkpoints=tmp_path, parameters=fits))] == ["ok", "ok"]
    _, room = check_checkpoints(situation(checkpoints=tmp_path, parameters=too_many))
    assert room.level == "error" and "3 checkpoints and the one that is being written" in room.expected
    _, room = check_checkpoints(situation(checkpoints=tmp_path, parameters=too_many, keep=1))
    assert room.level == "ok"


def test_a_slow_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_directory, "_write_speed", lambda place: 1e6)
    speed, _ = check_checkpoints(situation(checkpoints=tmp_path))
    assert speed.level == "warning" and "a checkpoint would take 120 s" in speed.expected


def test_markers(tmp_path):
    (tmp_path / "other").mkdir()
    with marked(tmp_path / "new") as name:
        assert sees_marker(tmp_path / "newer" / "still", name)  # neither is there yet: both are made below tmp_path
        assert not sees_marker(tmp_path / "other", name, limit_seconds=0.1)
    assert not sees_marker(tmp_path, name, limit_seconds=0.1)
    (tmp_path / "secret").touch()
    assert not sees_marker(tmp_path, "secret", limit_seconds=0.1)


def test_a_check_that_fails_is_a_finding():
    def check_nothing(situation):
        raise PermissionError("not for you")

    finding = one(check_machine(situation("a:1", "b:1", task=1), [check_nothing]))
    assert (finding.check, finding.level, finding.task) == ("nothing", "warning", "worker 1")
    assert "not for you" in finding.found
    assert check_tensorflow_start in CHECKS and tensorflow_start.LIMIT_SECONDS < 300


def test_this_package_starts_no_tensorflow():
    code = "import sys, tfdist.doctor.local_peers, tfdist.launch.main; print({'tensorflow', 'numpy'} & {*sys.modules})"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "set()\n"
