"""The launcher's output if it is closed, its reader is gone, or the disk is full."""

import fcntl
import os
import signal
import subprocess
import termios

import pytest

LIMIT_SECONDS = 240
SAVES = """
    def save(*_):
        signal.signal(signal.SIGTERM, lambda *_: os._exit(9))  # a second signal
        say("saving")
        time.sleep(0.8)  # more than a worker gets after a failure that leads to a restart
        note(f"saved-{RANK}")
        os._exit(75)
    signal.signal(signal.SIGTERM, save)
    note(f"up-{RANK}")
    hang()
"""


@pytest.mark.parametrize("with_errors", [True, False])
def test_ctrl_c_that_ends_the_reader_too(start, tmp_path, with_errors):
    """As in `tfdist run ... 2>&1 | tee log`: the terminal sends the signal to all processes of the pipeline."""
    reading, writing = os.pipe()
    tee = subprocess.Popen(["cat"], stdin=reading, stdout=subprocess.DEVNULL)
    errors = writing if with_errors else subprocess.DEVNULL
    run = start(SAVES, "--max-restarts", "1", stdout=writing, stderr=errors)
    os.close(reading)
    os.close(writing)
    run.wait_for("up-0", "up-1")
    run.process.send_signal(signal.SIGINT)
    tee.send_signal(signal.SIGINT)
    tee.wait()
    assert _ended(run, tmp_path) == (75, ["saved-0", "saved-1"])


def test_a_terminal_that_is_closed(start, tmp_path):
    own, workers_end = os.openpty()
    run = start(
        SAVES,
        "--max-restarts",
        "1",
        **dict.fromkeys(("stdin", "stdout", "stderr"), workers_end),
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(workers_end)
    run.wait_for("up-0", "up-1")
    os.close(own)
    assert _ended(run, tmp_path) == (75, ["saved-0", "saved-1"])


def test_a_reader_that_goes_away_ends_the_run(start, tmp_path):
    reading, writing = os.pipe()
    run = start("note(f'up-{RANK}'); wait_for('go'); say('hello'); hang()", "--grace", "0.3", stdout=writing)
    os.close(writing)
    run.wait_for("up-0", "up-1")
    os.close(reading)
    (tmp_path / "go").touch()
    assert run.process.wait(LIMIT_SECONDS) == 128 + signal.SIGPIPE


@pytest.mark.parametrize("descriptor", [0, 1, 2])
def test_a_standard_stream_that_was_closed_before(start, descriptor):
    ended = start("print('x')", preexec_fn=lambda: os.close(descriptor)).end()
    assert (ended.code, sorted(ended.out)) == (0, [] if descriptor == 1 else ["[0] x", "[1] x"])


def test_a_disk_that_is_full_under_the_logs(start, tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-0.log").symlink_to("/dev/full")
    ended = start("print('hello', flush=True); print('again')", "--log-dir", "logs").end()
    assert ended.code == 0
    assert sorted(ended.out) == ["[0] again", "[0] hello", "[1] again", "[1] hello"]
    told = [line for line in ended.said if "misses lines" in line]
    assert told == ["logs/rank-0.log misses lines that are only shown here: No space left on device"]
    assert (tmp_path / "logs" / "rank-1.log").read_text() == "hello\nagain\n"


def _ended(run, folder):
    code = run.process.wait(LIMIT_SECONDS)
    return code, sorted(path.name for path in folder.glob("saved-*"))
