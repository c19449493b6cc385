"""Workers beside parameter servers: each is restarted alone."""

from role_runs import QUICK, lines_of, of


def test_killed_worker_is_restarted_alone(run_roles, tmp_path):
    script = """
        up("ps-0", "worker-0")
        kill("worker-1")
        up("worker-1", life=1)
    """
    server = "        print(LIFE, os.environ['TF_CONFIG'], ATTEMPT)"
    ended = run_roles(script, "--log-dir", "logs", server=server)
    assert ended.code == 0
    assert lines_of(ended, "worker 1") == [
        "worker 1 failed: killed by SIGKILL (possibly the OOM killer); training continues without it; restart in 1 s"
    ]
    first, second = of(ended, "worker 1")
    assert (first[0], second[0]) == ("0", "1") and first[1:] == second[1:], "the same TF_CONFIG"
    assert (len(of(ended, "worker 0")), len(of(ended, "ps 0"))) == (1, 1)
    assert (tmp_path / "logs" / "worker-1.log").read_text() == f"{first}\n{second}\n"


def test_workers_that_exit_with_0_or_are_frozen_are_restarted(run_roles):
    server = """
        if (JOB, INDEX, LIFE) == ("worker", 0, 0):
            os._exit(0)
        if (JOB, INDEX, LIFE) == ("worker", 1, 0):
            up("worker-0", life=1)  # with which the training continues
            beat()
        if (JOB, INDEX, LIFE) == ("worker", 1, 1):
            os._exit(5)
    """
    ended = run_roles("up('worker-0', life=1); up('worker-1', life=2)", *QUICK, server=server)
    assert ended.code == 0
    assert lines_of(ended, "worker 0") == ["worker 0 ended: exit code 0; training continues without it; restart in 1 s"]
    assert lines_of(ended, "worker 1") == [
        "worker 1 failed: frozen: no heartbeat for 1 s; training continues without it; restart in 1 s",
        "worker 1 failed: exit code 5; training continues without it; restart in 2 s",
    ]


def test_restarted_worker_is_not_judged_by_the_silence_before(run_roles):
    server = """
        if (JOB, INDEX, LIFE) == ("worker", 1, 0):
            beat()
            die()
        if (JOB, INDEX) == ("worker", 1):
            note("second")
    """
    script = """
        wait_for("second")
        time.sleep(3.5)  # longer than the heartbeat timeout
    """
    ended = run_roles(script, "--heartbeat-timeout", "3", server=server)
    assert ended.code == 0
    assert not any("frozen" in line for line in ended.said)


def test_error_that_a_worker_reports_does_not_end_the_attempt(run_roles):
    server = """
        if (JOB, LIFE) == ("worker", 0):
            beat(error={"type": "KeyError", "message": "'x'"})
            note(f"reported-{INDEX}")
    """
    script = """
        wait_for("reported-0"), wait_for("reported-1")
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


def test_limit_of_worker_restarts(run_roles):
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
        "worker 1 failed: exit code 5; training continues without it; restart in 1 s",
        "worker 1 failed: exit code 5; not restarted (--worker-restarts 1)",
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


def test_processes_that_workers_leave_behind(run_roles):
    """One in the worker's process group is killed; one in another session, which holds its pipes, blocks nothing."""
    server = """
        if (JOB, INDEX, LIFE) == ("worker", 0, 0):
            grandchild("child", "signal.signal(signal.SIGTERM, signal.SIG_IGN); note('child-up'); hang()")
            wait_for("child-up")
            os._exit(5)
        if (JOB, INDEX, LIFE) == ("worker", 1, 0):
            grandchild("other", start_new_session=True)
            os._exit(5)
        print("second")
    """
    script = """
        wait_for("child-up")
        wait_ended("pid-child")
        up("worker-0", "worker-1", life=1)
    """
    ended = run_roles(script, "--grace", "60", server=server)
    assert (ended.code, of(ended, "worker 0"), of(ended, "worker 1")) == (0, ["second"], ["second"])
