import contextlib
import os
import re
import threading

import pytest

from tfdist.launch.processes.output import Console, LogFiles, OutputClosed, WorkerOutput
from tfdist.launch.run_spec import run_roles
from tfdist.utils.argument_checks import UsageError

TIME_LIMIT = 240


def test_each_line_carries_its_rank(run, tmp_path):
    ended = run("print('one\\ntwo'); print('three', file=sys.stderr)", workers=3)
    assert ended.code == 0
    assert sorted(ended.out) == [f"[{rank}] {word}" for rank in range(3) for word in ("one", "two")]
    assert sorted(line for line in ended.err if line.startswith("[")) == [f"[{rank}] three" for rank in range(3)]
    assert [ended.of(rank) for rank in range(3)] == [["one", "two"]] * 3
    assert not list(tmp_path.rglob("*.log")), "without --log-dir"


def test_lines_of_several_workers_do_not_mix(run):
    ended = run("for _ in range(500):\n  sys.stdout.write('ab'); sys.stdout.write('cd\\n')", workers=3)
    assert [ended.of(rank) for rank in range(3)] == [["abcd"] * 500] * 3


def test_unfinished_line_is_shown_while_the_worker_waits(start):
    run = start("sys.stdout.write('waiting'); wait_for('go'); print(' done')", workers=1)
    assert run.process.stdout.readline() == b"[0] waiting\n"
    (run._here / "go").touch()
    assert run.end().out == ["[0]  done"]


def test_progress_bar_is_shown_while_it_moves_and_at_its_end(start):
    script = """
        step = 0
        while not (HERE / "go").exists():
            step += 1
            sys.stdout.write("\\b" * 20 + f"\\r{step} steps")
            time.sleep(0.01)
        print("\\rlast step")
    """
    run = start(script, workers=1)
    assert run.process.stdout.readline().endswith(b" steps\n")
    (run._here / "go").touch()
    out = run.end().out
    assert out[-1] == "[0] last step"
    assert not any("\r" in line or "\b" in line for line in out)


def test_undecodable_bytes_a_character_in_two_pieces_and_an_unfinished_last_line(run):
    script = r"""
        if RANK == 0:
            sys.stdout.buffer.write(b"caf\xe9 \xc3\xa9\n")
            sys.stdout.buffer.write("é".encode()[:1])
        elif RANK == 1:
            os.write(1, b"\xc3")
            time.sleep(0.05)
            os.write(1, b"\xa9\n")
        else:
            sys.stdout.write("no newline")
    """
    ended = run(script, workers=3)
    assert [ended.of(rank) for rank in range(3)] == [["caf� é", "�"], ["é"], ["no newline"]]


def test_much_output_arrives_whole(run):
    ended = run("for i in range(50_000): print(i)\nprint('x' * 500_000)")
    for rank in range(2):
        assert ended.of(rank)[:50_000] == [str(i) for i in range(50_000)]
        assert "".join(ended.of(rank)[50_000:]) == "x" * 500_000


def test_log_files(run, tmp_path):
    logs = tmp_path / "deep" / "logs"
    script = "print('out', RANK); wait_for('never') if False else print('err', RANK, file=sys.stderr)"
    for _ in range(2):  # the second run starts with empty files
        assert run(script, "--log-dir", str(logs)).code == 0
        assert sorted(path.name for path in logs.iterdir()) == ["rank-0.log", "rank-1.log"]
        for rank in range(2):
            assert sorted((logs / f"rank-{rank}.log").read_text().splitlines()) == [f"err {rank}", f"out {rank}"]


def test_log_file_grows_while_the_worker_runs(start, tmp_path):
    run = start("print('early'); wait_for('go')", "--log-dir", "logs", workers=1)
    log = tmp_path / "logs" / "rank-0.log"
    run.until(lambda: log.exists() and log.read_text() == "early\n", "the log")
    (tmp_path / "go").touch()
    assert run.end().code == 0


def test_log_directory_that_cannot_be_created(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        UsageError, match="log files cannot be created. Received: --log-dir .*file .*Expected: .* Choose"
    ):
        LogFiles(tmp_path / "file")


def test_log_files_of_a_later_attempt_are_continued(tmp_path):
    """Also those of ranks that the host did not have before, as in a run on several hosts."""
    for rank in range(3):
        (tmp_path / f"rank-{rank}.log").write_text("earlier run\n")
    logs = LogFiles(tmp_path)
    roles = run_roles(2)
    for attempt, ranks in enumerate(([0], [1], [0, 1])):
        for rank, file in logs.open({rank: roles[rank] for rank in ranks}, attempt=attempt).items():
            file.write(f"output {rank}\n".encode())
    logs.close()
    texts = [(tmp_path / f"rank-{rank}.log").read_text() for rank in range(3)]
    lines = [re.sub(r"(attempt \d).*", r"\1", text).splitlines() for text in texts]
    assert lines == [
        ["output 0", "==== attempt 2", "output 0"],
        ["earlier run", "==== attempt 1", "output 1", "==== attempt 2", "output 1"],
        ["earlier run"],
    ]


def test_reader_that_goes_away_ends_the_run(start):
    run = start("note(f'up-{RANK}')\nwait_for('go')\nwhile True: print('x' * 1000)")
    run.wait_for("up-0", "up-1", "pid-0", "pid-1")
    run.process.stdout.close()
    (run._here / "go").touch()
    assert run.process.wait(TIME_LIMIT) == 128 + 13
    run.process.stderr.close()


def test_console_writes_all_to_a_pipe_that_does_not_block():
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    received = []

    def read():
        while data := os.read(reader, 4096):
            received.append(data)

    thread = threading.Thread(target=read)
    thread.start()
    Console(writer, writer).write("[0] ", ["x" * 300_000, "y"], is_error=False)
    os.close(writer)
    thread.join(TIME_LIMIT)
    os.close(reader)
    assert b"".join(received) == b"[0] " + b"x" * 300_000 + b"\n[0] y\n"


def test_console_raises_if_the_reader_is_gone():
    reader, writer = os.pipe()
    os.close(reader)
    with pytest.raises(OutputClosed):
        Console(writer, writer).say("x")
    os.close(writer)


def test_console_does_not_wait_for_a_blocked_reader():
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    os.set_blocking(writer, True)
    Console(writer, writer).say_unless_blocked("dropped")
    os.close(reader)
    Console(writer, writer).say_unless_blocked("nobody")
    os.close(writer)


@pytest.mark.parametrize(
    ("node", "shown"),
    [
        (None, "tfdist: own\ntfdist: of all\n"),
        (0, "tfdist: node 0: own\ntfdist: of all\n"),
        (1, "tfdist: node 1: own\n"),  # in the common output node 0 has shown the other line
    ],
)
def test_messages_of_nodes_with_a_common_output(node, shown):
    reader, writer = os.pipe()
    console = Console(writer, writer, node=node)
    console.say("own")
    console.say_to_all("of all")
    os.close(writer)
    with open(reader) as output:
        assert output.read() == shown


def test_console_shows_the_line_if_the_reader_is_ready():
    reader, writer = os.pipe()
    Console(writer, writer).say_unless_blocked("line")
    assert os.read(reader, 100) == b"tfdist: line\n"
    os.close(reader)
    os.close(writer)


class NoConsole:
    def write(self, *_, **__):
        pass


def test_the_last_lines_are_those_of_the_program_without_what_tensorflow_logs_at_its_start():
    output = WorkerOutput("0", NoConsole(), None)
    logged = [
        "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR",
        "I0000 00:00:1795356013.604564   24747 port.cc:153] oneDNN custom operations are on.",
        "2026-01-02 03:04:05.678: I tensorflow/core/util/port.cc:153] oneDNN custom operations are on.",
        "To enable the following instructions: AVX2 FMA, in other operations, rebuild TensorFlow with the appropriate",
    ]
    program = ["reading", "W0000 00:00:1795356013.604564   24747 a.cc:1] a warning", "Traceback", "ValueError: 3"]
    output.feed("\n".join([program[0], *logged, *program[1:], ""]).encode(), is_error=True, now=0.0)
    assert output.last_lines == tuple(program)
