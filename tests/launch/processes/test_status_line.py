"""The status line: the codes that it writes, and what a terminal shows while workers print."""

import os
import re
import threading

import pytest
from terminal import Terminal, screen

from tfdist.launch.processes.output import Console
from tfdist.launch.processes.run_status import StatusLine

NEVER_JUDGED = ("--heartbeat-timeout", "0", "--stall-timeout", "0")


@pytest.fixture
def terminal():
    terminal = Terminal()
    yield terminal
    terminal.close()


def line_on(terminal, **arguments):
    return StatusLine(terminal.end, **{"has_style": False, "is_ascii": False, **arguments})


def test_it_is_painted_in_place_when_it_changes(terminal):
    line = line_on(terminal)
    written = "".join(line.update(text, now=now) for now, text in enumerate(["long line", "long line", "short"]))
    assert written == "\r\x1b[Klong line\r\x1b[Kshort"
    assert screen(written) == ["short"]
    assert screen(written + line.update("", now=3.0)) == [""]


def test_it_is_not_painted_all_the_time(terminal):
    line = line_on(terminal)
    painted = [line.update(f"step {step}", now=step / 100) for step in range(100)]
    assert 4 <= sum(map(bool, painted)) <= 6
    assert line.update("", now=1.0), "its end waits for nothing"


def test_other_lines_stand_above_it(terminal):
    line = line_on(terminal)
    written = line.update("live", now=0) + line.around("[0] a\n[0] b\n") + line.around("[1] c\n")
    assert screen(written) == ["[0] a", "[0] b", "[1] c", "live"]


def test_it_fits_into_the_window_after_each_resize(terminal):
    line, text = line_on(terminal), "x" * 100
    assert [len(part) for part in screen(line.update(text, now=0))] == [79]
    terminal.resize(40)
    written = line.update(text, now=1)
    assert screen(written, 40) == ["x" * 38 + "…"]
    assert line.update(text, now=2) == ""
    terminal.resize(100)
    assert screen(line.update(text, now=2.5), 100) == ["x" * 98 + "…"], "a full row would begin another one"
    terminal.resize(101)
    assert screen(line.update(text, now=3), 101) == [text]
    terminal.resize(10)
    assert screen(line.update(text, now=4), 10) == [""]
    assert screen(line.around("hello\n"), 10) == ["hello", ""]


def test_a_window_without_a_size_has_80_columns(terminal):
    terminal.resize(0)
    assert len(screen(line_on(terminal).update("x" * 100, now=0))[0]) == 79


def test_style_and_characters(terminal):
    assert line_on(terminal, has_style=True).update("a · b", now=0) == "\r\x1b[K\x1b[2ma · b\x1b[0m"
    assert line_on(terminal, is_ascii=True).update("a · b", now=0) == "\r\x1b[Ka | b"
    terminal.resize(25)
    assert line_on(terminal, is_ascii=True).update("x" * 30, now=0).endswith("x~")


@pytest.mark.parametrize(
    ("environ", "encoding", "painted"),
    [
        ({"TERM": "xterm"}, "utf-8", "\r\x1b[K\x1b[2m·\x1b[0m"),
        ({"TERM": "xterm", "NO_COLOR": ""}, "UTF8", "\r\x1b[K\x1b[2m·\x1b[0m"),
        ({"TERM": "xterm", "NO_COLOR": "1"}, "utf-8", "\r\x1b[K·"),
        ({"TERM": "xterm", "NO_COLOR": "1"}, "ascii", "\r\x1b[K|"),
        ({"TERM": "dumb"}, "utf-8", None),
        ({"TERM": ""}, "utf-8", None),
        ({}, "utf-8", None),
    ],
    ids=["terminal", "empty NO_COLOR", "NO_COLOR", "ascii", "dumb", "empty TERM", "no TERM"],
)
def test_the_environment_counts(terminal, environ, encoding, painted):
    line = StatusLine.on(terminal.end, environ, encoding)
    assert (line and line.update("·", now=0)) == painted


def test_files_have_none(tmp_path):
    with open(tmp_path / "log", "w") as file:
        assert StatusLine.on(file.fileno(), {"TERM": "xterm"}, "utf-8") is None


def test_another_terminal_is_another(terminal):
    other = Terminal()
    line, copy = line_on(terminal), os.dup(terminal.end)
    assert [line.is_on(fd) for fd in (terminal.end, copy, other.end)] == [True, True, False]
    os.close(copy)
    other.close()


def test_console_shows_and_ends_it(terminal):
    class Status:
        step = 1

        def line(self, *, now):
            return f"step {self.step}"

    console = Console(terminal.end, terminal.end, status_line=line_on(terminal))
    assert not console.has_status_line
    status = Status()
    console.follow(status, now=0.0)
    assert console.has_status_line
    console.show_status(now=1.0)
    console.write("[0] ", ["hello"], is_error=False)
    status.step = 2
    console.show_status(now=2.0)
    console.say("news")
    terminal.read()
    assert screen(terminal.text) == ["[0] hello", "tfdist: news", "step 2"]
    console.follow(None, now=3.0)
    console.say("end")
    terminal.read()
    assert screen(terminal.text) == ["[0] hello", "tfdist: news", "tfdist: end", ""]


def test_console_writes_messages_to_a_log_and_the_last_ones_at_the_end(terminal):
    class Status:
        def new_messages(self, *, now, is_over=False):
            return [f"{now}"] + ["last"] * is_over

    console = Console(terminal.end, terminal.end)
    console.show_status(now=0.0)
    console.follow(Status(), now=1.0)
    console.show_status(now=2.0)
    assert not console.has_status_line
    for now in (3.0, 4.0):
        console.follow(None, now=now)
    terminal.read()
    assert terminal.text.splitlines() == ["tfdist: 2.0", "tfdist: 3.0", "tfdist: last"]


def test_console_does_not_wait_for_a_paused_terminal(terminal):
    class Status:
        def line(self, *, now):
            return f"{now}"

    console = Console(terminal.end, terminal.end, status_line=line_on(terminal))
    console.follow(Status(), now=0.0)
    os.set_blocking(terminal.end, False)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(terminal.end, b"x" * 4096)
    os.set_blocking(terminal.end, True)
    paint = threading.Thread(target=console.show_status, kwargs={"now": 1.0}, daemon=True)
    paint.start()
    paint.join(10)
    assert not paint.is_alive()


SCRIPT = """
    if RANK == 0:
        for step in range(1, 1231):
            if step % 300 == 0:
                print(f"\\rline {step}", flush=True)
            sys.stdout.write(f"\\r{step}/1230")
            sys.stdout.flush()
        print()
        beat(step=1230, saved=4, saved_step=1200)
    else:
        print("x" * 100, file=sys.stderr, flush=True)
    wait_for("go")
    print("bye", RANK)
"""


def test_workers_print_above_the_line_and_nothing_is_left_of_it(start, terminal, tmp_path):
    options = {"stdout": terminal.end, "stderr": terminal.end, "env": {"TERM": "xterm", "PYTHONUTF8": "1"}}
    run = start(SCRIPT, *NEVER_JUDGED, **options)
    terminal.until(r"tfdist: 2 workers · step 1,230 · checkpoint 1,200, [1-9]\d* s ago")
    terminal.resize(30)
    before = len(terminal.text)
    assert terminal.until(r"\r\x1b\[K\x1b\[2m[^\x1b]*…", before).endswith("tfdist: 2 workers · step 1,2…")
    (tmp_path / "go").touch()
    assert run.end().code == 0
    terminal.read()
    shown = screen(terminal.text, columns=200)
    assert [row for row in shown if "tfdist" in row] == shown[:1], "what the launcher says at the start"
    # The bar is also shown where it pauses for two seconds.
    of_0 = [row for row in shown if row.startswith("[0] ") and not re.fullmatch(r"\[0\] (?!1230)\d+/1230", row)]
    assert of_0 == [f"[0] line {step}" for step in (300, 600, 900, 1200)] + ["[0] 1230/1230", "[0] bye 0"]
    assert sorted(row for row in shown[1:] if not row.startswith("[0] ")) == ["", "[1] bye 1", "[1] " + "x" * 100]


def test_a_file_gets_no_status_line_though_errors_go_to_a_terminal(start, terminal):
    script = "beat(step=7); print('out'); print('err', file=sys.stderr); wait_for('go')"
    run = start(script, *NEVER_JUDGED, workers=1, stderr=terminal.end, env={"TERM": "xterm", "NO_COLOR": "1"})
    assert run.process.stdout.readline() == b"[0] out\n"
    terminal.until(r"\[0\] err(.|\n)*tfdist: 1 worker . step 7")
    (run._here / "go").touch()
    assert run.end().out == []
    terminal.read()
    assert screen(terminal.text)[-2:] == ["[0] err", ""]


def test_a_dumb_terminal_gets_no_status_line(run, terminal):
    script = "beat(step=1, saved=0, saved_step=1)"
    ended = run(script, *NEVER_JUDGED, workers=1, stderr=terminal.end, env={"TERM": "dumb"})
    assert ended.code == 0
    terminal.read()
    assert "\r" not in terminal.text and "\x1b" not in terminal.text
    assert terminal.text.splitlines()[1:] == [
        "tfdist: training resumes after step 1 with 1 worker",
        "tfdist: checkpoint saved at step 1",
    ]
