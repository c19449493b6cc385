"""`from_notebook`: values, output and errors of the workers."""

import atexit
import functools
import glob
import linecache
import os
import signal
import sys
import tempfile
import threading
import time
import types

import pytest
from notebook_cells import CELL, forget_clusters, in_cell

from tfdist.launch import WorkerError, from_notebook
from tfdist.utils.argument_checks import UsageError

pytest.importorskip("cloudpickle", reason="needs the extra `notebook`")
LIMIT_SECONDS = 240


@pytest.fixture(autouse=True)
def outside_of_clusters(monkeypatch):
    forget_clusters(monkeypatch)


@pytest.fixture
def cell():
    name = "/tmp/ipykernel_1/2.py"
    yield types.SimpleNamespace(**in_cell(CELL, name))
    del linecache.cache[name]


def test_values_are_listed_by_rank(cell):
    values = from_notebook(cell.add, 1, workers=3)
    assert all(type(value) is cell.Pair for value in values)
    assert [value.both for value in values] == [(0, 41), (1, 41), (2, 41)]


def test_what_a_function_uses_is_sent_with_it(cell, tmp_path, monkeypatch):
    (tmp_path / "own_module.py").write_text("def answer(): return 42")
    monkeypatch.syspath_prepend(str(tmp_path))
    import own_module

    number = 2

    def source():
        import inspect

        return inspect.getsource(rank)

    def call_all(*functions):
        return [function() for function in functions]

    rank = cell.rank
    with_keyword = functools.partial(cell.add, 1, more=5)
    (values,) = from_notebook(call_all, with_keyword, lambda: number + 1, own_module.answer, source, workers=1)
    assert values[0].both == (0, 46)
    assert values[1:3] == [3, 42], "a closure; a module of this process's search path"
    assert values[3].startswith("def rank():\n    return json.loads"), "source of a cell"


def test_workers_have_a_cluster_their_share_of_the_cores_and_a_seed(cell, monkeypatch):
    for name in ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")

    def look():
        from tfdist import cluster

        names = ("OMP_NUM_THREADS", "MPLBACKEND", "TFDIST_SEED")
        found = cluster.detect()
        return str(found.task), len(found.cluster.jobs["worker"]), *map(os.environ.get, names), sys.stdin.read()

    assert from_notebook(look, threads_per_worker=3, seed=7) == [
        ("worker 0", 2, "3", None, "7", ""),
        ("worker 1", 2, "3", None, "7", ""),
    ]


def test_output_is_prefixed_with_the_rank(cell, capfd):
    def speak():
        print("out")
        print("I0000 00:00:1795281089.361059   18699 port.cc:153] oneDNN", file=sys.stderr)
        print("err", file=sys.stderr)

    from_notebook(speak, threads_per_worker=1)
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["[0] out", "[1] out"]
    workers = [line for line in err.splitlines() if line.startswith("[")]
    assert sorted(workers) == ["[0] err", "[1] err"]  # conftest.py asks TensorFlow for errors alone
    assert err.splitlines()[0].startswith("tfdist: 2 workers, 1 thread each")


def test_tensorflows_log_is_shown_unless_it_is_turned_off(capfd, monkeypatch):
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL")
    from_notebook(lambda: print("I0000 00:00:17952.361   18699 port.cc:153] oneDNN", file=sys.stderr), workers=1)
    assert "[0] I0000 00:00:17952.361   18699 port.cc:153] oneDNN" in capfd.readouterr().err


def test_error_shows_the_users_line(cell, capfd):
    with pytest.raises(WorkerError) as caught:
        from_notebook(cell.fail)
    assert caught.value.rank == 1
    first, _, rest = str(caught.value).partition("\n\n")
    assert first == "Worker 1 of 2 failed: ZeroDivisionError: division by zero"
    lines = rest.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1:3] == [
        '  File "/tmp/ipykernel_1/2.py", line 14, in fail',
        "    return 1 / 0  # the user's line",
    ]
    assert lines[-1] == "ZeroDivisionError: division by zero"
    assert caught.value.traceback.splitlines() == lines
    shown = capfd.readouterr().err.splitlines()
    assert [line for line in shown if line.startswith("[1]")] == [f"[1] {line}" for line in lines]
    assert sum("ZeroDivisionError" in line for line in shown) == 1  # the launcher does not repeat them
    assert "tfdist: worker 1 failed first: exit code 1." in shown


@pytest.mark.parametrize(
    ("ending", "words"),
    [
        ("sys.exit(0)", "Worker 1 returned nothing. Received: exit code 0 before"),
        ("os.kill(os.getpid(), 9)", "Worker 1 of 2 failed: killed by SIGKILL (possibly the OOM killer"),
        (
            "print('last words', flush=True) or os._exit(3)",
            "Worker 1 of 2 failed: exit code 3\nIts last lines:\n  last",
        ),
    ],
    ids=["exit-0", "killed", "last-words"],
)
def test_worker_that_ends_without_an_exception(cell, ending, words):
    in_cell(f"import sys\ndef end():\n    if rank(): {ending}", "<cell>", namespace := vars(cell))
    with pytest.raises(WorkerError) as caught:
        from_notebook(namespace["end"])
    assert str(caught.value).startswith(words) and caught.value.rank == 1


def test_unpicklable_value_names_rank_and_type_without_a_restart(cell, tmp_path):
    rank, calls = cell.rank, tmp_path / "calls"

    def lock():
        with open(calls, "a") as file:
            file.write("called\n")
        return threading.Lock() if rank() == 1 else None

    with pytest.raises(WorkerError, match=r"value of worker 1 .* Received: lock \(cannot pickle '_thread.lock'"):
        from_notebook(lock, max_restarts=1)
    assert calls.read_text().count("called") == 2


def test_restart_returns_the_values_of_the_last_attempt(cell, tmp_path):
    rank, done = cell.rank, tmp_path / "done"

    def flaky():
        attempt = int(os.environ["TFDIST_ATTEMPT"])
        if attempt == 0 and rank() == 1:
            end = time.monotonic() + 60
            while not done.exists() and time.monotonic() < end:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        if attempt == 0:
            done.touch()
        return rank(), attempt

    assert from_notebook(flaky, max_restarts=1) == [(0, 1), (1, 1)]


def test_error_after_a_restart_lists_earlier_attempts(cell):
    def dies():
        os.kill(os.getpid(), signal.SIGKILL) if os.environ["TFDIST_ATTEMPT"] == "0" else sys.exit(5)

    with pytest.raises(WorkerError, match=r"code 5\nThis was attempt 2. Earlier attempts:\n  attempt 1: worker 0: ki"):
        from_notebook(dies, workers=1, max_restarts=1)


def test_error_about_a_lost_worker_is_one_line_and_not_the_cause(cell, tmp_path, capfd):
    rank, raised = cell.rank, tmp_path / "raised"

    def lose():
        if rank() == 0:
            atexit.register(raised.touch)  # when the error has been printed
            raise RuntimeError("Graph execution error:\n\nCollective ops is aborted by: Socket closed\nMore words")
        end = time.monotonic() + LIMIT_SECONDS
        while not raised.exists() and time.monotonic() < end:
            time.sleep(0.01)
        os._exit(7)

    with pytest.raises(WorkerError, match="Worker 1 of 2 failed: exit code 7") as caught:
        from_notebook(lose, grace_seconds=60)
    assert caught.value.rank == 1
    shown = [line for line in capfd.readouterr().err.splitlines() if line.startswith("[0]")]
    assert shown == [
        "[0] Traceback (most recent call last):",
        "[0] RuntimeError: Collective ops is aborted by: Socket closed",
    ]


def test_log_files_remain_and_temporary_files_do_not(cell, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    from_notebook(lambda: print("said"), workers=1, log_dir=tmp_path / "logs")
    assert (tmp_path / "logs" / "rank-0.log").read_text() == "said\n"
    assert not glob.glob(str(tmp_path / "temporary" / "*"))


def test_in_another_thread(cell):
    values: list[object] = []
    thread = threading.Thread(target=lambda: values.extend(from_notebook(lambda: 1)))
    thread.start()
    thread.join(LIMIT_SECONDS)
    assert values == [1, 1]


def test_elastic_restarts_one_worker_while_the_other_runs(cell, tmp_path):
    values = from_notebook(lives, str(tmp_path), workers=2, elastic=1)
    assert values == [["life-0"], ["life-0", "life-1"]]


def test_elastic_has_no_value_of_a_worker_that_was_lost(cell, tmp_path):
    assert from_notebook(lives, str(tmp_path), True, workers=2, elastic=1, grace_seconds=0.5) == [["life-0"], None]


def lives(directory, is_lost=False):
    """Worker 1 is killed once; worker 0 waits for its second life, which does not return if it `is_lost`."""
    import json
    import os
    import pathlib
    import time

    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    mine, other = pathlib.Path(directory, str(rank)), pathlib.Path(directory, "1")
    mine.mkdir(exist_ok=True)
    life = f"life-{len(list(mine.iterdir()))}"
    (mine / life).touch()
    while (rank == 0 and not (other / "life-1").exists()) or (rank == 1 and life != "life-0" and is_lost):
        time.sleep(0.02)
    if rank == 1 and life == "life-0":
        os.kill(os.getpid(), 9)
    return sorted(path.name for path in mine.iterdir())


def test_elastic_with_fewer_workers_is_an_error_that_names_the_arguments(cell):
    with pytest.raises(UsageError, match=r"Received: workers=2 elastic=3\. Expected: elastic=2, or less\."):
        from_notebook(lambda: 1, workers=2, elastic=3)
