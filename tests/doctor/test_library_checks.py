"""Checks of the installed libraries and of TensorFlow's start."""

import contextlib
import importlib.util
import os
import sys
import time
from pathlib import Path

import pytest
from machines import context, one, write

from tfdist.doctor import library_checks as libraries
from tfdist.doctor.library_checks import check_tensorflow_start

GB = 10**9


@pytest.mark.parametrize(
    ("version", "level"), [((3, 11, 2), "ok"), ((3, 13, 0), "ok"), ((3, 10, 9), "error"), ((3, 14, 0), "error")]
)
def test_python(monkeypatch, version, level):
    monkeypatch.setattr(sys, "version_info", version)
    assert one(libraries.check_python(context())).level == level


@pytest.mark.parametrize(
    ("versions", "levels"),
    [
        ({"tensorflow": "2.21.0", "keras": "3.15.1"}, ["ok", "ok"]),
        ({"tensorflow": "2.21.0rc1", "keras": "3.15.0.dev3"}, ["ok", "ok"]),
        ({"tensorflow": "2.18.0rc2", "keras": "3.10.0"}, ["ok", "ok"]),
        ({"tensorflow": "2.23.0", "keras": "3.16.0"}, ["warning", "warning"]),
        ({"tensorflow": "2.17.1", "keras": "3.9.2"}, ["error", "error"]),
        ({"tensorflow": "nonsense", "keras": "3.15.1"}, ["error", "ok"]),
    ],
)
def test_tested_versions(monkeypatch, versions, levels):
    monkeypatch.setattr(libraries, "installed_versions", lambda: versions)
    found = {x.check: x for x in libraries.check_libraries(context())}
    assert [found["tensorflow"].level, found["keras"].level] == levels
    assert found["safetensors"].level == "ok"
    wrong = {"warning": "which tfdist is not tested with", "error": "which tfdist does not support"}
    for name in versions:
        problem = wrong.get(found[name].level)
        assert found[name].found == (f"{versions[name]}, {problem}" if problem else versions[name])
    if levels[0] != "ok":
        assert 'pip install "tensorflow>=2.18,<2.23"' in found["tensorflow"].remedy


@pytest.mark.parametrize(
    ("addresses", "environ", "levels"),
    [
        ((), {}, []),
        (("a:1", "b:1"), {}, ["warning"]),
        (("a:1", "b:1"), {"PYTHONHASHSEED": "random"}, ["warning"]),
        (("a:1", "b:1"), {"PYTHONHASHSEED": "0"}, ["ok"]),
    ],
)
def test_workers_need_one_seed_of_hashes(addresses, environ, levels):
    assert [x.level for x in libraries.check_hash_seed(context(*addresses, environ=environ))] == levels


def test_missing_library(monkeypatch):
    monkeypatch.setattr(libraries, "installed_versions", dict)
    monkeypatch.setattr(libraries, "_installed", lambda name: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    findings = libraries.check_libraries(context())
    assert {x.level for x in findings} == {"error"} and {x.found for x in findings} == {"not installed"}
    assert libraries.own_versions()["tensorflow"] == "not installed"


def test_a_build_from_a_package_of_another_name(monkeypatch):
    """The import accepts it: tfdist.versions looks for the module."""
    monkeypatch.setattr(libraries, "installed_versions", lambda: {"keras": "3.15.1"})
    monkeypatch.setattr(libraries, "_installed", lambda name: None if name == "tensorflow" else "9999")
    found = {x.check: x for x in libraries.check_libraries(context())}
    assert (found["tensorflow"].level, found["keras"].level) == ("warning", "ok")
    assert "of unknown version" in found["tensorflow"].found and "pip install" not in found["tensorflow"].remedy
    assert libraries.own_versions()["tensorflow"] == "unknown version"


def start(program, root=None, timeout_seconds=30, **environ):
    environ = {"PATH": os.environ["PATH"], **environ}
    machine = context(environ=environ, **({} if root is None else {"root": root}))
    return {x.check: x for x in check_tensorflow_start(machine, program=program, timeout_seconds=timeout_seconds)}


def says(**changes):
    result = {
        "seconds": 1.0,
        "bytes": GB,
        "backend": "tensorflow",
        "devices": [["CPU", ""]],
        "symbols": 3,
        "missing": "",
    }
    return f"import json; print('noise'); print(json.dumps({ {**result, **changes}!r}))"


def test_successful_start(tmp_path):
    found = start(says(devices=[["CPU", ""], ["GPU", "A100"], ["GPU", "A100"]]), root=tmp_path)
    assert {x.level for x in found.values()} == {"ok"}
    assert found["devices"].found == "1 CPU, 2 GPU (A100)"
    assert found["tensorflow start"].found == "1.0 s to import, 1.0 GB of memory"


@pytest.mark.parametrize(
    ("program", "found", "remedy"),
    [
        ("import sys; sys.exit('no libcudart')", "ended with exit code 1: no libcudart", "pip check"),
        ("import no_such_thing", "No module named 'no_such_thing'", "pip check"),
        ("import os; os.kill(os.getpid(), 4)", "ended by SIGILL", "a newer processor"),
        ("import os; os.kill(os.getpid(), 9)", "ended by SIGKILL", "dmesg"),
        ("import os; os.kill(os.getpid(), 11)", "ended by SIGSEGV", "driver"),
        ("print('[]')", "ended with exit code 0", "pip check"),
        ("pass", "ended with exit code 0", "pip check"),
    ],
)
def test_start_that_crashes(program, found, remedy):
    finding = one(start(program).values())
    assert (finding.check, finding.level) == ("tensorflow start", "error")
    assert found in finding.found and remedy in finding.remedy


def test_start_that_hangs(tmp_path):
    """Its child process ends, too."""
    program = (
        "import os, subprocess, sys, time, pathlib\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(child.pid))\n"
        "print('loading', file=sys.stderr, flush=True); time.sleep(600)"
    )
    finding = one(start(program, timeout_seconds=5).values())  # it needs time to print
    assert finding.level == "error" and finding.found == "still running after 5 s (loading)"
    stat, end = Path("/proc", (tmp_path / "pid").read_text(), "stat"), time.monotonic() + 20
    with contextlib.suppress(OSError):  # reaped, perhaps between opening the file and reading it
        while stat.read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < end, "still alive"
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
