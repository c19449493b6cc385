"""The socket of a run, and who is answered there."""

import socket
import stat
import threading

import pytest

from tfdist.launch.cli import resize_command
from tfdist.launch.cli.main import main
from tfdist.launch.cli.resize_command import request
from tfdist.launch.processes.control_socket import ControlSocket
from tfdist.launch.processes.event_loop import EventLoop
from tfdist.utils.argument_checks import UsageError


@pytest.fixture
def serve(tmp_path):
    """`serve(answer)`: answers at `run.sock` until the test ends."""
    control, events, is_over = ControlSocket(tmp_path / "run.sock"), EventLoop(None, None), threading.Event()

    def loop():
        while not is_over.is_set():
            events.wait(0.01)

    thread = threading.Thread(target=loop)

    def begin(answer):
        control.answer_by(answer, events)
        thread.start()
        return tmp_path / "run.sock"

    yield begin
    is_over.set()
    thread.join()
    events.close()
    control.close()
    assert not (tmp_path / "run.sock").exists()


def test_requests_are_answered_and_only_by_the_same_user(serve, capsys):
    path = serve(lambda message: {"text": f"{message['workers']} workers"})
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert main(["resize", str(path), "3"]) == 0
    assert capsys.readouterr().out == "3 workers\n"


def test_a_request_is_refused(serve, capsys):
    path = serve(lambda message: {"error": "The number of workers is out of range. Received: 9. Expected: 1 to 4."})
    assert main(["resize", str(path), "9"]) == 2
    assert "tfdist resize: error: The number of workers is out of range. Received: 9" in capsys.readouterr().err


def test_who_sends_nothing_or_nonsense_does_not_keep_others_from_an_answer(serve):
    path = serve(lambda message: {"text": "answered"})
    silent = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(40)]
    for connection in silent:
        connection.connect(str(path))
    silent[-1].send(b"[")
    assert request(path, {}) == "answered"
    assert silent[-1].recv(100) == b"", "it is closed"
    for connection in silent:
        connection.close()


def test_a_request_that_was_not_answered_in_time_is_not_carried_out_later(serve, tmp_path, monkeypatch):
    monkeypatch.setattr(resize_command, "_ANSWER_SECONDS", 0.01)
    with pytest.raises(UsageError, match="between two attempts, or the launcher is stopped. Ask again"):
        request(tmp_path / "run.sock", {"workers": 1})
    monkeypatch.undo()
    carried_out = []
    path = serve(lambda message: {"text": str(carried_out.append(message["workers"]))})
    request(path, {"workers": 2})
    assert carried_out == [2]


def test_who_gets_no_answer_asks_again(serve):
    def fail(message):
        raise OSError

    path = serve(fail)
    with pytest.raises(UsageError, match="does not answer"):
        request(path, {})


def test_no_run_answers(tmp_path):
    with pytest.raises(UsageError, match=r"No run answers. Received: .*run.sock \(No such file"):
        request(tmp_path / "run.sock", {})


def test_the_socket_of_a_run_that_was_killed_is_replaced_and_others_are_not(tmp_path):
    path = tmp_path / "run.sock"
    left = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    left.bind(str(path))
    left.close()
    ControlSocket(path).close()
    path.write_text("a file")
    with pytest.raises(UsageError, match="The control socket cannot be created. Received: .*Address already in use"):
        ControlSocket(path)
    assert path.read_text() == "a file"
    path.unlink()
    first = ControlSocket(path)
    with pytest.raises(UsageError, match="at which no other run listens"):
        ControlSocket(path)
    first.close()
    with pytest.raises(UsageError, match="at most 107 bytes"):
        ControlSocket(tmp_path / ("x" * 200))
