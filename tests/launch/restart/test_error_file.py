import json
import os
import signal
import socket
import time
from pathlib import Path

import pytest

from tfdist.launch.restart.attempt_outcome import ErrorFile, Outcome, error_entry
from tfdist.launch.restart.worker_exit import WorkerExit
from tfdist.utils.argument_checks import UsageError

NO_DELAY = ("--restart-delay", "0")
FAILED = error_entry(Outcome(0, 1, (WorkerExit(0, 3),)), "f00d", earlier=[])


def read(path):
    return json.loads(path.read_text())


def test_cause_of_a_failure(run, tmp_path):
    before = time.time()
    script = """
        if RANK == 0:
            hang()
        beat(step=41, saved=4)
        wait_for("pid-0")
        raise KeyError("the cause")
    """
    ended = run(script, "--error-file", "deep/error.json", "--max-restarts", "0")
    assert ended.code == 1
    said = read(tmp_path / "deep" / "error.json")
    assert (said["attempt"], said["workers"], said["host"]) == (0, 2, socket.gethostname())
    assert (said["last_step"], said["last_saved"], said["earlier"]) == (41, 4, [])
    cause = said["cause"]
    assert {name: cause[name] for name in ("rank", "host", "exit_code", "signal", "exception", "description")} == {
        "rank": 1,
        "host": socket.gethostname(),
        "exit_code": 1,
        "signal": None,
        "exception": "KeyError",
        "description": "exit code 1",
    }
    assert cause["last_lines"][-1] == "KeyError: 'the cause'"
    assert [(end["rank"], end["signal"], end["was_signalled"]) for end in said["exits"]] == [
        (1, None, False),
        (0, "SIGTERM", True),
    ]
    from datetime import datetime

    times = [datetime.fromisoformat(text).timestamp() for text in (said["started"], cause["ended"])]
    assert before - 1 < times[0] <= times[1] < time.time() + 1
    assert len(said["run"]) == 16


def test_signal(run, tmp_path):
    run("die('SIGSEGV')", "--error-file", "error.json", workers=1)
    cause = read(tmp_path / "error.json")["cause"]
    assert (cause["exit_code"], cause["signal"], cause["exception"]) == (None, "SIGSEGV", None)


def test_frozen_worker(run, tmp_path):
    run("beat(step=2); hang()", "--heartbeat-timeout", "1", "--error-file", "error.json", workers=1)
    cause = read(tmp_path / "error.json")["cause"]
    assert cause["description"] == "frozen: no heartbeat for 1 s (last step 2)"


def test_exception_that_was_reported_by_heartbeat(run, tmp_path):
    script = """
        from tfdist.cluster.heartbeat import Heartbeat
        Heartbeat.from_environment().start()
        raise ValueError("too\\nlong")
    """
    run(script, "--error-file", "error.json", workers=1)
    cause = read(tmp_path / "error.json")["cause"]
    assert (cause["exception"], cause["message"]) == ("ValueError", "too\nlong")


def test_one_file_for_each_attempt_in_the_log_directory(run, tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "attempt-7.json").touch()  # of an earlier run
    (logs / "attempt.json").touch()  # of somebody else
    script = "beat(step=ATTEMPT)\nif ATTEMPT < 2: sys.exit(10 + ATTEMPT)"
    assert run(script, "--max-restarts", "2", "--log-dir", "logs", *NO_DELAY, workers=1).code == 0
    assert sorted(path.name for path in logs.iterdir()) == [
        "attempt-0.json",
        "attempt-1.json",
        "attempt.json",
        "rank-0.log",
    ]
    first, second = read(logs / "attempt-0.json"), read(logs / "attempt-1.json")
    assert [said["cause"]["exit_code"] for said in (first, second)] == [10, 11]
    assert first["run"] == second["run"]
    assert second["earlier"] == [{"attempt": 0, "cause": "worker 0: exit code 10"}]


def test_one_file_describes_the_last_failed_attempt(run, tmp_path):
    script = "beat(step=ATTEMPT); sys.exit(10 + ATTEMPT)"
    run(script, "--max-restarts", "2", "--error-file", "error.json", "--log-dir", "logs", *NO_DELAY, workers=1)
    said = read(tmp_path / "error.json")
    assert (said["attempt"], said["cause"]["exit_code"]) == (2, 12)
    assert [earlier["attempt"] for earlier in said["earlier"]] == [0, 1]
    assert not list((tmp_path / "logs").glob("*.json"))


def test_success_leaves_no_file(run, tmp_path):
    (tmp_path / "error.json").write_text("of an earlier run")
    assert run("pass", "--error-file", "error.json").code == 0
    assert not (tmp_path / "error.json").exists()


def test_nothing_is_written_by_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert ErrorFile(None, None).write(FAILED) == ""
    assert not list(tmp_path.iterdir())


def test_file_is_complete_or_missing(tmp_path, monkeypatch):
    path = tmp_path / "error.json"
    file = ErrorFile(path, None)
    path.write_text("before")

    def fail(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    assert file.write(FAILED) == f"the error file {path} could not be written (No space left on device)"
    assert [entry.name for entry in tmp_path.iterdir()] == ["error.json"]
    assert path.read_text() == "before"


def test_file_that_cannot_be_written_does_not_end_the_run(run, tmp_path):
    script = "os.rmdir(HERE / 'gone'); sys.exit(6)"
    ended = run(script, "--error-file", "gone/error.json", workers=1)
    assert ended.code == 6
    assert any(line.startswith("the error file gone/error.json could not be written") for line in ended.said)


def test_path_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="The error file cannot be written. Received: .*Expected: .*--error-file"):
        ErrorFile(tmp_path / "file" / "error.json", None)


def test_worker_that_could_not_be_started():
    outcome = Outcome(1, 2, (), start_failure=(1, OSError(12, "Cannot allocate memory")))
    assert outcome.describe() == "worker 1 could not be started: [Errno 12] Cannot allocate memory"
    assert (outcome.failed_rank, outcome.exit_code, outcome.has_failed) == (1, 1, True)


def test_host_of_the_cause_is_that_of_its_worker():
    ended = WorkerExit(1, 3, host="another host")
    assert error_entry(Outcome(0, 2, (ended,)), "f00d", earlier=[])["cause"]["host"] == "another host"


def test_another_host_removes_the_files_of_an_earlier_run_at_the_same_time(tmp_path, monkeypatch):
    (tmp_path / "attempt-0.json").touch()
    listed = list(tmp_path.iterdir())

    def iterdir(path):
        (tmp_path / "attempt-0.json").unlink()
        return iter(listed)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    ErrorFile(None, tmp_path)


def test_another_host_writes_at_the_same_time(tmp_path, monkeypatch):
    """Its process has the same number, as in two containers."""
    monkeypatch.setattr(os, "getpid", lambda: 7)
    first, second, answers, flush = ErrorFile(None, tmp_path), ErrorFile(None, tmp_path), [], os.fsync

    def fsync(descriptor):
        flush(descriptor)
        if not answers:
            answers.append("")
            answers[0] = second.write({"attempt": 0, "host": "b"})

    monkeypatch.setattr(os, "fsync", fsync)
    assert first.write({"attempt": 0, "host": "a"}) == ""
    assert answers == [""]
    assert [path.name for path in tmp_path.iterdir()] == ["attempt-0.json"]
    assert read(tmp_path / "attempt-0.json") == {"attempt": 0, "host": "a"}


def test_a_host_that_joins_again_keeps_the_files_of_the_run(node, tmp_path):
    script = """
        note(f"up-{RANK}-of-{ATTEMPT}")
        if ATTEMPT < 2:
            beat(step=ATTEMPT + 1)
            hang()
    """
    options = ("--max-restarts", "2", "--log-dir", "logs", *NO_DELAY)
    first, second = (node(rank, script, *options) for rank in (0, 1))
    first.wait_for("up-0-of-0", "up-1-of-0")
    os.kill(first.pids()["pid-0"], signal.SIGKILL)
    first.wait_for("up-0-of-1", "up-1-of-1")
    second.process.kill()
    second.process.communicate()
    again = node(1, script, *options)
    assert [first.end().code, again.end().code] == [0, 0]
    assert sorted(path.name for path in (tmp_path / "logs").glob("attempt*")) == ["attempt-0.json", "attempt-1.json"]


def test_a_new_run_on_several_hosts_removes_the_files_of_an_earlier_one(both, tmp_path):
    (tmp_path / "logs").mkdir()
    for name in ("attempt-0.json", "attempt-7.json", "mine.json"):
        (tmp_path / "logs" / name).touch()
    assert [ended.code for ended in both("pass", "--log-dir", "logs")] == [0, 0]
    assert [path.name for path in (tmp_path / "logs").glob("*.json")] == ["mine.json"]
