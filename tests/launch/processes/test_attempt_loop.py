import signal

import pytest


def test_exit_with_0_does_not_end_the_others(run):
    ended = run("wait_gone(RANK - 1) if RANK else None; print('ended', RANK)", workers=3)
    assert (ended.code, ended.out) == (0, ["[0] ended 0", "[1] ended 1", "[2] ended 2"])


def test_exit_codes_and_signals_of_first_failures(run):
    """Each attempt fails in another way; the exit code of the run is the last one's."""
    script = """
        ways = [1, 3, 77, 255, "SIGKILL", "SIGSEGV", "SIGABRT", "SIGTERM"]
        beat(step=ATTEMPT)
        if RANK != ATTEMPT % 2:
            hang()
        sys.exit(ways[ATTEMPT]) if ATTEMPT < 4 else die(ways[ATTEMPT])
    """
    ended = run(script, "--max-restarts", "7", "--restart-delay", "0")
    assert ended.code == 128 + signal.SIGTERM
    for attempt, code in enumerate([1, 3, 77, 255]):
        assert f"worker {attempt % 2} failed: exit code {code}" in ended.said
        assert f"worker {attempt % 2} failed first: exit code {code}. It printed nothing." in ended.said
    for attempt, name in enumerate(["SIGKILL", "SIGSEGV", "SIGABRT", "SIGTERM"]):
        assert any(line.startswith(f"worker {attempt % 2} failed first: killed by {name}") for line in ended.said)


@pytest.mark.parametrize("way", ["sys.exit(77)", "die('SIGKILL')"])
def test_exit_code_of_the_run(run, way):
    assert run(f"{way} if RANK == 1 else hang()").code == {"sys.exit(77)": 77}.get(way, 137)


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
    """The launcher is stopped while they exit, so that it sees all exits at once."""
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


def test_worker_that_reports_a_lost_peer_is_not_the_cause(run):
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


def test_peer_that_is_still_shutting_down_is_the_cause(run):
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


def test_lost_peer_is_reported_if_there_is_no_other_failure(run):
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
    ended = run(script, "--grace", "3")  # it needs time to print
    assert ended.code == 4
    assert ended.of(0) == ["no"]
    assert "worker 0 ended after that: killed by SIGKILL" in ended.said
