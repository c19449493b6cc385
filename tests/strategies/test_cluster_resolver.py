"""What the environment says of a cluster: the start timeout, the limit of silence, servers of a chief."""

import socket

import pytest

from tfdist.strategies.cluster_resolver import (
    beginning_workers,
    check_workers_run_the_script,
    is_elastic_run,
    silence_limit_of_environment,
    start_timeout_of,
)
from tfdist.tensorflow_internals.runtime import silence_limit
from tfdist.tensorflow_internals.tensorflow_symbols import context


@pytest.mark.parametrize("value", ["abc", "nan", "inf", "0", "-3"])
def test_start_timeout_variable_is_checked(monkeypatch, value):
    monkeypatch.setenv("TFDIST_START_TIMEOUT", value)
    with pytest.raises(ValueError, match=f"variable TFDIST_START_TIMEOUT. Received: TFDIST_START_TIMEOUT='{value}'"):
        start_timeout_of(None)
    assert start_timeout_of(7) == 7


def test_start_timeout_by_default(monkeypatch):
    monkeypatch.delenv("TFDIST_START_TIMEOUT", raising=False)
    assert start_timeout_of(None) == 300
    monkeypatch.setenv("TFDIST_START_TIMEOUT", "2.5")
    assert start_timeout_of(None) == 2.5


def test_elastic_variable(monkeypatch):
    monkeypatch.delenv("TFDIST_ELASTIC", raising=False)
    assert [is_elastic_run(argument) for argument in (None, False, True)] == [False, False, True]
    for value, expected in (("1", True), ("0", False), (" ", False)):
        monkeypatch.setenv("TFDIST_ELASTIC", value)
        assert is_elastic_run(None) is expected
    for value in ("2", "true"):
        monkeypatch.setenv("TFDIST_ELASTIC", value)
        with pytest.raises(ValueError, match=f"TFDIST_ELASTIC.*Received: TFDIST_ELASTIC='?{value}.*--elastic"):
            is_elastic_run(None)
        assert is_elastic_run(False) is False


def test_number_of_workers_that_begin(monkeypatch):
    monkeypatch.delenv("TFDIST_ELASTIC_WORKERS", raising=False)
    assert beginning_workers(4) == 4
    monkeypatch.setenv("TFDIST_ELASTIC_WORKERS", "2")
    assert beginning_workers(4) == 2
    for value in ("1", "5", "two"):
        monkeypatch.setenv("TFDIST_ELASTIC_WORKERS", value)
        with pytest.raises(ValueError, match=f"TFDIST_ELASTIC_WORKERS.*Received: TFDIST_ELASTIC_WORKERS='?{value}"):
            beginning_workers(4)


def test_silence_is_judged_by_the_launcher_if_there_is_one(monkeypatch):
    for name in ("TFDIST_HEARTBEAT_FD", "TFDIST_SILENCE_LIMIT"):
        monkeypatch.delenv(name, raising=False)
    assert silence_limit_of_environment() == 60
    supervisor, worker = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with supervisor, worker:
        monkeypatch.setenv("TFDIST_HEARTBEAT_FD", str(worker.fileno()))
        assert silence_limit_of_environment() == 3600
        with pytest.raises(BlockingIOError):  # it has asked only: no heartbeat, and no end of them
            supervisor.recv(100, socket.MSG_DONTWAIT)
    monkeypatch.setenv("TFDIST_SILENCE_LIMIT", "600")
    assert silence_limit_of_environment() == 600
    monkeypatch.setenv("TFDIST_SILENCE_LIMIT", "soon")
    with pytest.raises(ValueError, match="TFDIST_SILENCE_LIMIT.*Set TFDIST_SILENCE_LIMIT to a number of seconds"):
        silence_limit_of_environment()
    monkeypatch.delenv("TFDIST_SILENCE_LIMIT")
    assert silence_limit_of_environment() == 60  # a child of the worker inherits the variable alone


def test_the_limit_of_silence_is_given_to_tensorflow_once(monkeypatch):
    given = []
    monkeypatch.setattr(
        type(context()), "configure_coordination_service", lambda _, kind, **options: given.append(options)
    )
    with silence_limit(61.5):
        context().configure_coordination_service("standalone", service_leader="/job:worker")
    context().configure_coordination_service("standalone")
    assert given == [{"service_leader": "/job:worker", "heartbeat_timeout_in_ms": 61500}, {}]


@pytest.mark.parametrize(("job", "option"), [("worker", "--chief"), ("ps", "--parameter-servers")])
def test_servers_of_a_chief_do_not_train(monkeypatch, job, option):
    """The chief would wait for them until its start timeout."""
    spec = {"chief": ["a:1"], "worker": ["a:2"], job: ["a:3"]}
    monkeypatch.delenv("TFDIST_RUN_ID", raising=False)
    check_workers_run_the_script(spec)  # of another launcher, whose workers run the script
    monkeypatch.setenv("TFDIST_RUN_ID", "f00d")
    check_workers_run_the_script({"worker": ["a:1", "a:2"]})
    with pytest.raises(ValueError, match=f"from tfdist run {option}. Expected: workers alone. .* without {option}"):
        check_workers_run_the_script(spec)
