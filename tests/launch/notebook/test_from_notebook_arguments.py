"""What `from_notebook` cannot send, and invalid options."""

import functools
import os
import pathlib
import subprocess
import sys
import threading
import types

import pytest
from notebook_cells import forget_clusters

from tfdist.launch import from_notebook
from tfdist.launch.function_call.function_pickling import _PROCESS_BOUND, _TENSOR, _loaded
from tfdist.launch.function_call.launcher_process import in_python

pytest.importorskip("cloudpickle", reason="needs the extra `notebook`")
LIMIT_SECONDS = 240


@pytest.fixture(autouse=True)
def outside_of_clusters(monkeypatch):
    forget_clusters(monkeypatch)


def helper_with(thing):
    def helper():
        return thing

    return lambda: helper()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda file: (lambda: None, threading.Lock()),
            "argument 1 of type lock (cannot pickle '_thread.lock' object)",
        ),
        (lambda file: (lambda: None, 1, [file]), "argument 2 of type list (it holds an open file)"),
        (lambda file: (helper_with(threading.Lock()),), ".helper, which uses `thing` of type lock (cannot pickle"),
        (lambda file: (helper_with(file),), "which uses `thing` of type TextIOWrapper (it is an open file)"),
        (lambda file: (functools.partial(print, threading.Lock()),), "print, which uses `argument 1` of type lock"),
        (lambda file: (helper_with({"a": Model()}),), "which uses `thing` of type dict (it holds a keras.Model)"),
        (lambda file: (print, Tensor()), "argument 1 of type Tensor (it is a tf.Tensor)"),
    ],
    ids=["argument", "file-in-a-list", "helper", "file", "partial", "model", "tensor"],
)
def test_what_cannot_be_sent_is_named(make, words, monkeypatch):
    monkeypatch.setitem(sys.modules, "keras", types.SimpleNamespace(Model=Model))
    monkeypatch.setitem(sys.modules, "tensorflow", types.SimpleNamespace(Tensor=Tensor))
    with pytest.raises(
        TypeError, match="cannot be sent to the workers. Received: .* Expected: a function whose"
    ) as caught:
        with open(os.devnull) as file:
            from_notebook(*make(file))
    assert words in str(caught.value)


class Model:
    """Replaces Keras'."""


class Tensor:
    """Replaces TensorFlow's."""


@pytest.mark.usefixtures("cpus")
def test_rejected_types_exist():
    assert len(_loaded([*_PROCESS_BOUND, _TENSOR])) == len(_PROCESS_BOUND) + 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"workers": 0}, "Received: workers=0. Expected: a whole number of at least 1."),
        ({"workers": True}, "Received: workers=True."),
        ({"workers": 2.5}, "Received: workers=2.5."),
        ({"max_restarts": float("nan")}, "Invalid `max_restarts`. Received: max_restarts=nan."),
        ({"max_restarts": -1}, "Received: max_restarts=-1. Expected: a whole number of at least 0."),
        ({"threads_per_worker": 1.5}, "Received: threads_per_worker=1.5."),
        (
            {"grace_seconds": float("nan")},
            "Received: grace_seconds=nan. Expected: a finite number of seconds of at least 0.",
        ),
        ({"grace_seconds": float("inf")}, "Received: grace_seconds=inf."),
        ({"grace_seconds": True}, "Received: grace_seconds=True."),
        ({"network": "my"}, "Received: network='my'. Expected: one of"),
        ({"log_dir": "/proc/none"}, "Received: log_dir='/proc/none' (No such file or directory)."),
    ],
)
def test_invalid_option(options, words):
    with pytest.raises(ValueError) as caught:
        from_notebook(print, **options)
    assert words in str(caught.value)


def test_value_instead_of_a_function():
    with pytest.raises(TypeError, match=r"Received: \[1\] of type list. .* not from_notebook\(train\(\)\)"):
        from_notebook([1])


def test_worker_cannot_have_workers(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}')
    with pytest.raises(ValueError, match="A cluster is described already. Received: TF_CONFIG="):
        from_notebook(print)


def test_without_cloudpickle(monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(ImportError, match=r"pip install 'tfdist\[notebook\]'"):
        from_notebook(print)


def test_launch_loads_neither_cloudpickle_nor_tensorflow():
    program = """
import sys, tfdist.launch.cli.main, tfdist.launch as launch
launch.from_notebook, launch.WorkerError
print([name for name in ("cloudpickle", "tensorflow", "keras", "numpy") if name in sys.modules])
try:
    launch.nothing
except AttributeError as error:
    print(error)
"""
    root = pathlib.Path(__file__).resolve().parents[3]
    out = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=True
    ).stdout
    assert out.splitlines() == ["[]", "module 'tfdist.launch' has no attribute 'nothing'"]


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("(--max-restarts 1)", "(max_restarts=1)"),
        ("use --network host.", "use network='host'."),
        ("--log-dir /a/b.c (why)", "log_dir='/a/b.c' (why)"),
        ("a -- b --c", "a -- b --c"),
        ("(SIGKILL after --grace 5)", "(SIGKILL after grace_seconds=5)"),
    ],
)
def test_options_are_shown_as_arguments(said, shown):
    assert in_python(said) == shown
