import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tfdist.cluster import PREEMPTED_EXIT_CODE
from tfdist.cluster import heartbeat as module
from tfdist.cluster.heartbeat import VARIABLE, Heartbeat

ROOT = Path(__file__).resolve().parents[2]
TIME_LIMIT = 240


@pytest.fixture(autouse=True)
def first_fit(monkeypatch):
    """Other tests of this process may have trained."""
    monkeypatch.setattr(Heartbeat, "_fits", 0)


@pytest.fixture
def ends():
    supervisor, worker = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    supervisor.settimeout(TIME_LIMIT)
    yield supervisor, worker
    supervisor.close()
    worker.close()


@pytest.fixture
def heartbeat(ends):
    hook = sys.excepthook
    made = Heartbeat(ends[1].fileno())
    yield made
    made.close()
    assert sys.excepthook is hook


def receive(supervisor):
    return json.loads(supervisor.recv(65_536))


def receive_all(supervisor):
    """The datagrams that have arrived."""
    supervisor.setblocking(False)
    found = []
    try:
        while True:
            found.append(receive(supervisor))
    except BlockingIOError:
        supervisor.settimeout(TIME_LIMIT)
        return found


def run_worker(code, ends):
    """Runs a worker to its end; returns its exit code, its standard error and what it sent."""
    supervisor, worker = ends
    ended = subprocess.run(
        [sys.executable, "-c", f"from tfdist.cluster.heartbeat import Heartbeat\n{code}"],
        env={**os.environ, VARIABLE: str(worker.fileno()), "PYTHONPATH": str(ROOT)},
        pass_fds=(worker.fileno(),),
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT,
    )
    return ended.returncode, ended.stderr, receive_all(supervisor)


def test_preempted_exit_code():
    assert PREEMPTED_EXIT_CODE == os.EX_TEMPFAIL


def test_every_datagram_has_the_complete_state(ends, heartbeat):
    heartbeat.step(3)
    assert receive(ends[0]) == {"alive": True, "step": 3}
    heartbeat.saved(7, 2)
    assert receive(ends[0]) == {"alive": True, "step": 3, "saved": 7, "saved_step": 2}
    heartbeat.ready()
    assert receive(ends[0]) == {"alive": True, "step": 3, "saved": 7, "saved_step": 2, "ready": True}
    heartbeat.phase("validation")
    assert receive(ends[0])["phase"] == "validation"
    heartbeat.error(KeyError("x"))
    assert receive(ends[0])["error"] == {"type": "KeyError", "message": "'x'"}


def test_step_ends_a_phase(ends, heartbeat, monkeypatch):
    monkeypatch.setattr(module, "_STEP_INTERVAL_SECONDS", 0.0)
    heartbeat.phase("validation")
    heartbeat.step(4)
    assert ["phase" in sent for sent in receive_all(ends[0])] == [True, False]


def test_batches_belong_to_a_phase(ends, heartbeat, monkeypatch):
    monkeypatch.setattr(module, "_STEP_INTERVAL_SECONDS", 0.0)
    heartbeat.batch(3)
    heartbeat.phase("validation")
    heartbeat.batch(1)
    heartbeat.step(4)
    heartbeat.phase("finished")
    sent = [(message.get("phase"), message.get("batch")) for message in receive_all(ends[0])]
    assert sent == [("validation", None), ("validation", 1), (None, None), ("finished", None)]


def test_quick_steps_are_not_all_sent(ends, heartbeat, monkeypatch):
    sent = []
    monkeypatch.setattr(heartbeat, "_send", lambda: sent.append(1))
    for step in range(10_000):
        heartbeat.step(step)
    assert len(sent) < 5_000
    monkeypatch.undo()
    heartbeat.saved(0, 9_999)  # the last one is sent
    assert receive(ends[0])["step"] == 9_999


def test_it_sends_until_it_is_closed(ends, heartbeat, monkeypatch):
    monkeypatch.setattr(module, "INTERVAL_SECONDS", 0.01)
    heartbeat.start()
    heartbeat.start()  # the second call does nothing
    assert [receive(ends[0]) for _ in range(5)] == [{"alive": True}] * 5
    assert [thread.name for thread in threading.enumerate()].count("tfdist-heartbeat") == 1
    monkeypatch.setattr(module, "INTERVAL_SECONDS", 1000.0)
    receive_all(ends[0])  # the thread sends at most twice more, so that there is room for the last one
    heartbeat.close()
    heartbeat.close()
    assert receive_all(ends[0])[-1] == {"alive": False}
    assert "tfdist-heartbeat" not in [thread.name for thread in threading.enumerate()]


def test_later_training_replaces_an_earlier_one(ends, heartbeat, monkeypatch):
    monkeypatch.setattr(module, "INTERVAL_SECONDS", 0.01)
    heartbeat.step(100)
    heartbeat.start()
    later = Heartbeat(ends[1].fileno())
    later.step(1)
    later.start()
    receive_all(ends[0])
    assert [receive(ends[0]).get("step") for _ in range(5)] == [1] * 5
    later.close()


def test_trainings_of_a_process_are_numbered(ends, heartbeat, monkeypatch):
    monkeypatch.setattr(module, "INTERVAL_SECONDS", 1000.0)  # unread datagrams would fill the socket
    heartbeat.start()
    heartbeat.step(100)
    later = Heartbeat(ends[1].fileno())
    later.start()
    later.step(1)
    later.close()
    numbers = [(sent.get("fit"), sent.get("step")) for sent in receive_all(ends[0])]
    assert (None, 100) in numbers and (2, 1) in numbers
    assert {number for number, step in numbers if step != 1} <= {None, 2}


def test_losses_and_joins_are_sent_by_the_heartbeat_that_is_started(ends, heartbeat, monkeypatch):
    monkeypatch.setattr(module, "INTERVAL_SECONDS", 1000.0)
    totals = {"lost": 2, "joined": 1, "repeated_steps": 3, "seconds_lost": 0.5}
    trainer = Heartbeat(ends[1].fileno())
    trainer.membership(**totals)
    assert receive(ends[0]) == {"membership": totals}, "alone: nothing says that the process is alive"
    heartbeat.start()
    heartbeat.step(41)
    receive_all(ends[0])
    trainer.membership(**totals)
    trainer.close()
    assert receive_all(ends[0]) == [{"alive": True, "step": 41, "membership": totals}]
    heartbeat.saved(7, 41)
    assert receive(ends[0])["membership"] == totals


def test_supervisor_that_does_not_read_blocks_nothing(ends, heartbeat):
    began = time.monotonic()
    for sequence in range(20_000):
        heartbeat.saved(sequence, sequence)
    assert time.monotonic() - began < TIME_LIMIT
    receive_all(ends[0])
    heartbeat.saved(20_000, 20_000)
    assert receive(ends[0])["saved"] == 20_000


def test_nothing_raises_after_the_supervisor_has_exited(ends, heartbeat):
    ends[0].close()
    heartbeat.start()
    heartbeat.step(1)
    heartbeat.saved(1, 1)
    heartbeat.close()
    heartbeat.step(2)


def test_from_environment(ends):
    heartbeat = Heartbeat.from_environment({VARIABLE: str(ends[1].fileno())})
    heartbeat.step(5)
    assert receive(ends[0]) == {"alive": True, "step": 5}
    heartbeat.close()
    ends[1].send(b"still open")


@pytest.mark.parametrize("value", [None, "", "x", "-1", "99999", "9" * 30, "²"])
def test_no_supervisor(value):
    assert Heartbeat.from_environment({} if value is None else {VARIABLE: value}) is None


def test_descriptor_of_something_else(tmp_path):
    with open(tmp_path / "file", "w") as file:
        assert Heartbeat.from_environment({VARIABLE: str(file.fileno())}) is None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        assert Heartbeat.from_environment({VARIABLE: str(other.fileno())}) is None


def test_descriptors_are_not_leaked(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    with open(tmp_path / "file", "w") as file:
        for _ in range(3):
            Heartbeat.from_environment({VARIABLE: str(file.fileno())})
    assert len(os.listdir("/proc/self/fd")) == before


def test_forked_child_sends_nothing(ends):
    code = """if True:
        import os, sys
        heartbeat = Heartbeat.from_environment()
        heartbeat.step(1)
        if os.fork() == 0:
            heartbeat.step(2)
            heartbeat.saved(3, 2)
            sys.exit()
        os.wait()
    """
    assert run_worker(code, ends)[2] == [{"alive": True, "step": 1}]


def test_exit_is_sent(ends):
    code, error, sent = run_worker("Heartbeat.from_environment().start()", ends)
    assert (code, error) == (0, "")
    # As many before it as there was time for.
    assert [datagram["alive"] for datagram in sent] == [True] * (len(sent) - 1) + [False]


def test_uncaught_exception_is_sent(ends):
    code, error, sent = run_worker("Heartbeat.from_environment().start(); raise ValueError('x' * 9000)", ends)
    assert code == 1
    assert error.splitlines()[-1] == f"ValueError: {'x' * 9000}"
    error = {"type": "ValueError", "message": "x" * 2000}
    assert sent[-1] == {"alive": False, "error": error}
    errors = [datagram["error"] for datagram in sent if "error" in datagram]
    assert len(errors) >= 2 and errors == [error] * len(errors), "also before the end"


def test_exception_is_sent_when_there_is_room_again(ends):
    """Unread datagrams fill the socket for a time."""
    supervisor, worker = ends
    heartbeat = Heartbeat(worker.fileno())
    heartbeat.start()
    with pytest.raises(BlockingIOError):
        while True:
            worker.send(b"{}", socket.MSG_DONTWAIT)
    heartbeat.error(ValueError("why"))
    try:
        while "error" not in (sent := json.loads(supervisor.recv(9999))):
            pass
    finally:
        heartbeat.close()
    assert sent["error"] == {"type": "ValueError", "message": "why"}


def test_exit_is_sent_before_earlier_exit_handlers_run(ends):
    """These may take long; silence must not count then."""
    code = """if True:
        import atexit, os
        atexit.register(lambda: os.write(2, str(Heartbeat._active).encode()))
        Heartbeat.from_environment().start()
    """
    assert run_worker(code, ends)[1] == "None"


def test_a_message_does_not_overtake_a_newer_one(ends, heartbeat, monkeypatch):
    """A thread that is interrupted between reading the state and sending it must not send an old step last."""
    is_reading, may_send = threading.Event(), threading.Event()

    def wait_in_the_first_thread(message):
        text = json.dumps(message)
        if threading.current_thread() is first:
            is_reading.set()
            assert may_send.wait(TIME_LIMIT)
        return text

    monkeypatch.setattr(module, "json", type("Json", (), {"dumps": staticmethod(wait_in_the_first_thread)}))
    first = threading.Thread(target=heartbeat.phase, args=["validation"])
    first.start()
    assert is_reading.wait(TIME_LIMIT)
    second = threading.Thread(target=heartbeat.phase, args=["end of validation"])
    second.start()
    second.join(timeout=0.5)  # it sends, unless it waits for the first
    may_send.set()
    first.join(TIME_LIMIT)
    second.join(TIME_LIMIT)
    assert [receive(ends[0])["phase"] for _ in range(2)] == ["validation", "end of validation"]
