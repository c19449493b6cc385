import signal

import pytest


def test_all_end_with_zero(run):
    ended = run("print(RANK)", workers=3)
    assert (ended.code, sorted(ended.out)) == (0, ["[0] 0", "[1] 1", "[2] 2"])


def test_one_that_ends_with_zero_leaves_the_others_alone(run):
    ended = run("wait_gone(0) if RANK else None; print('ended', RANK)")
    assert (ended.code, ended.out) == (0, ["[0] ended 0", "[1] ended 1"])


@pytest.mark.parametrize("code", [1, 3, 77, 255])
def test_exit_code_of_the_first_failure(run, code):
    ended = run(f"sys.exit({code}) if RANK == 1 else hang()")
    assert ended.code == code
    assert f"worker 1 failed: exit code {code}" in ended.said
    assert f"worker 1 failed first: exit code {code}. It printed nothing." in ended.said


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGABRT", "SIGTERM"])
def test_signal_of_the_first_failure(run, name):
    ended = run(f"os.kill(os.getpid(), signal.{name}) if RANK == 0 else hang()")
    assert ended.code == 128 + signal.Signals[name]
    assert any(line.startswith(f"worker 0 failed first: killed by {name}") for line in ended.said)


def test_last_lines_of_the_first_failure(run):
    script = """
        if RANK == 0:
            print("not me")
            hang()
        wait_for("pid-0")
        for i in range(50):
            print("line", i)
        raise KeyError("the cause")
    """
    ended = run(script)
    report = ended.said[ended.said.index("worker 1 failed first: exit code 1. Its last lines:") + 1 :]
    assert len(report) == 20
    assert report[-1] == "  | KeyError: 'the cause'"
    assert any("line 49" in line for line in report)
    assert not any("line 29" in line or "not me" in line for line in report)


def test_output_written_just_before_the_end_is_in_the_report(run):
    ended = run("os.write(1, b'x' * 60_000 + b'\\nlast words'); os._exit(9)", workers=1)
    assert ended.said[-1] == "  | last words"


@pytest.mark.parametrize("order", [(2, 0, 1), (1, 2, 0), (0, 1, 2)])
def test_first_in_time_among_several_failures(start, state, order):
    """The launcher is stopped while they end, so that it sees all of them at once."""
    run = start("note(f'up-{RANK}'); wait_for(f'go-{RANK}'); os._exit(10 + RANK)", workers=3)
    run.wait_for("up-0", "up-1", "up-2")
    pids = run.pids()
    run.process.send_signal(signal.SIGSTOP)
    for rank in order:
        (run._here / f"go-{rank}").touch()
        run.until(lambda rank=rank: state(pids[f"pid-{rank}"]) == "Z", f"the end of worker {rank}")
    run.process.send_signal(signal.SIGCONT)
    ended = run.end()
    assert ended.code == 10 + order[0]
    assert any(line.startswith(f"worker {order[0]} failed first: exit code {10 + order[0]}") for line in ended.said)


def test_echo_of_a_failing_peer_is_never_the_cause(run):
    script = """
        if RANK == 0:
            wait_for("pid-1")
            raise RuntimeError("UnavailableError: Collective ops is aborted by: Socket closed")
        wait_gone(0)
        print("the cause")
        os._exit(7)
    """
    ended = run(script, "--grace", "30")
    assert ended.code == 7
    assert "worker 0 ended after that: exit code 1" not in ended.said[:-3]
    assert ended.said[-2:] == ["worker 1 failed first: exit code 7. Its last lines:", "  | the cause"]


def test_peer_that_is_still_shutting_down_is_the_cause_of_an_echo(run):
    script = """
        if RANK == 0:
            wait_for("raised")
            raise RuntimeError("Error received from peer")
        try:
            raise KeyError("the cause")
        except KeyError:
            import traceback
            traceback.print_exc()
        note("raised")
        hang()
    """
    ended = run(script, "--grace", "0.3")
    assert ended.code == 1
    assert "worker 1 failed first: an error, while it was still shutting down. Its last lines:" in ended.said
    assert ended.said[-1] == "  | KeyError: 'the cause'"


def test_echo_alone_is_reported(run):
    ended = run("hang() if RANK else None; raise RuntimeError('Socket closed')", "--grace", "0.2")
    assert ended.code == 1
    assert "worker 0 failed first: exit code 1. Its last lines:" in ended.said


def test_the_others_get_sigterm_and_time(run):
    script = """
        if RANK == 1:
            wait_for("ready")
            sys.exit(4)
        def leave(*_):
            print("saving")
            note("saved")
            sys.exit(0)
        signal.signal(signal.SIGTERM, leave)
        note("ready")
        hang()
    """
    ended = run(script, "--grace", "60")
    assert ended.code == 4
    assert ended.of(0) == ["saving"]
    assert "worker 0 ended after that: exit code 0" in ended.said


def test_worker_that_ignores_sigterm_is_killed_after_the_grace(run):
    script = """
        if RANK == 1:
            wait_for("ready")
            sys.exit(4)
        signal.signal(signal.SIGTERM, lambda *_: print("no"))
        note("ready")
        hang()
    """
    ended = run(script, "--grace", "0.4")
    assert ended.code == 4
    assert ended.of(0) == ["no"]
    assert "worker 0 ended after that: killed by SIGKILL" in ended.said
