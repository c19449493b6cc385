"""Workers of parameter servers come and go: each is started again alone."""

from role_runs import QUICK, lines_of, of


def test_killed_worker_is_started_again_alone(run_roles, tmp_path):
    script = """
        up("ps-0", "worker-0")
        kill("worker-1")
        up("worker-1", life=1)
    """
    server = "        print(LIFE, os.environ['TF_CONFIG'], ATTEMPT)"
    ended = run_roles(script, "--log-dir", "logs", server=server)
    assert ended.code == 0
    assert lines_of(ended, "worker 1") == [
        "worker 1 failed: killed by SIGKILL (if nobody did so by hand: often the kernel, out of memory); the training "
        "goes on without it; started again in 1 s"
    ]
    first, second = of(ended, "worker 1")
    assert (first[0], second[0]) == ("0", "1") and first[1:] == second[1:], "the same TF_CONFIG"
    assert (len(of(ended, "worker 0")), len(of(ended, "ps 0"))) == (1, 1)
    assert (tmp_path / "logs" / "worker-1.log").read_text() == f"{first}\n{second}\n"


def test_worker_that_ends_well_is_started_again_too(run_roles):
    ended = run_roles(
        "up('worker-0', life=1)", server="        if JOB == 'worker' and LIFE == 0: os._exit(0)", workers=1
    )
    assert ended.code == 0
    assert lines_of(ended, "worker 0") == [
        "worker 0 ended: exit code 0; the training waits for it; started again in 1 s"
    ]


def test_frozen_worker_is_killed_and_started_again(run_roles):
    server = """
        if (JOB, INDEX, LIFE) == ("worker", 1, 0):
            beat()
        if (JOB, INDEX, LIFE) == ("worker", 1, 1):
            os._exit(5)
    """
    ended = run_roles("up('worker-1', life=2)", *QUICK, server=server)
    assert ended.code == 0
    assert lines_of(ended, "worker 1") == [
        "worker 1 failed: frozen: no heartbeat for 1 s; the training goes on without it; started again in 1 s",
        "worker 1 failed: exit code 5; the training goes on without it; started again in 2 s",
    ]


def test_worker_started_again_is_judged_anew(run_roles):
    """The silence of the former is not its own."""
    server = """
        if (JOB, INDEX, LIFE) == ("worker", 1, 0):
            beat()
            die()
        if (JOB, INDEX) == ("worker", 1):
            note("second")
    """
    script = """
        wait_for("second")
        time.sleep(1.5)  # time in which it would be found frozen
    """
    ended = run_roles(script, *QUICK, server=server)
    assert ended.code == 0
    assert not any("frozen" in line for line in ended.said)


def test_error_that_a_worker_tells_of_does_not_end_the_attempt(run_roles):
    server = """
        if (JOB, LIFE) == ("worker", 0):
            beat(error={"type": "KeyError", "message": "'x'"})
            note(f"told-of-{INDEX}")
    """
    script = """
        wait_for("told-of-0"), wait_for("told-of-1")
        time.sleep(1.0)  # twice the grace, after which the launcher would end all
        print("through")
    """
    ended = run_roles(script, "--grace", "0.5", server=server)
    assert (ended.code, of(ended, "chief")) == (0, ["through"])


def test_workers_do_not_use_up_restarts(run_roles):
    script = """
        if ATTEMPT == 0:
            for task in ("worker-0", "worker-1"):
                kill(task)
            up("worker-0", "worker-1", life=1)
            beat(step=1)
            die()
    """
    ended = run_roles(script, "--max-restarts", "1", "--restart-delay", "0")
    assert ended.code == 0
    assert "restart 1 of 1 at once with 2 workers" in ended.said


def test_bounded_restarts_of_a_worker(run_roles):
    server = "        if (JOB, INDEX) == ('worker', 1): os._exit(5)"
    script = "up('worker-0', 'ps-0'); wait_for('pid-worker-1-life-1'); wait_gone_of('worker-1', 1)"
    helper = """
        def wait_gone_of(task, life):
            stat = pathlib.Path("/proc", (HERE / f"pid-{task}-life-{life}").read_text(), "stat")
            wait_until(lambda: not stat.exists())
    """
    ended = run_roles(helper + "\n        " + script, "--worker-restarts", "1", server=server)
    assert ended.code == 0
    assert lines_of(ended, "worker 1") == [
        "worker 1 failed: exit code 5; the training goes on without it; started again in 1 s",
        "worker 1 failed: exit code 5; not started again (--worker-restarts 1)",
    ]


def test_the_attempt_fails_when_no_worker_is_left(run_roles):
    server = """
        if JOB == "worker":
            up("ps-0")
            print("last words")
            os._exit(5)
    """
    ended = run_roles("hang()", "--worker-restarts", "0", server=server)
    assert ended.code == 5
    last = next(line for line in ended.said if "failed first" in line)
    assert last.endswith("failed first: exit code 5; no worker is left (--worker-restarts 0). Its last lines:")
    assert last.startswith("worker ")
    assert "  | last words" in ended.said
    assert "chief ended after that: killed by SIGTERM" in ended.said


def test_what_a_worker_leaves_behind_is_killed(run_roles):
    server = """
        if (JOB, INDEX, LIFE) == ("worker", 0, 0):
            grandchild("child", "signal.signal(signal.SIGTERM, signal.SIG_IGN); note('child-up'); hang()")
            wait_for("child-up")
            os._exit(5)
    """
    script = """
        wait_for("child-up")
        stat = pathlib.Path("/proc", (HERE / "pid-child").read_text(), "stat")
        wait_until(lambda: not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z")
        up("worker-0", life=1)
    """
    assert run_roles(script, "--grace", "60", server=server).code == 0


def test_worker_that_left_someone_with_its_output_is_started_again(run_roles):
    """A process of another session holds the pipes of the former worker."""
    server = """
        if (JOB, LIFE) == ("worker", 0):
            grandchild(f"child-{INDEX}", start_new_session=True)
            os._exit(5)
        print("again")
    """
    ended = run_roles("up('worker-0', 'worker-1', life=1)", server=server)
    assert (ended.code, of(ended, "worker 0"), of(ended, "worker 1")) == (0, ["again"], ["again"])
