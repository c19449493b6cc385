"""Runs whose attempts are restarted."""

import json
import re
import signal

import pytest

from tfdist.utils.cores_and_ports import usable_cores

NO_DELAY = ("--restart-delay", "0")


def restart_lines(ended):
    return [line for line in ended.said if line.startswith("restart ")]


def test_killed_worker_is_followed_by_a_new_attempt_of_all(run):
    script = """
        say(ATTEMPT, os.environ["TFDIST_RUN_ID"], json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"])
        if ATTEMPT == 0:
            die() if RANK == 1 else hang()
    """
    ended = run(script, "--max-restarts", "3", *NO_DELAY)
    assert ended.code == 0
    assert any(line.startswith("worker 1 failed first: killed by SIGKILL") for line in ended.said)
    assert restart_lines(ended) == ["restart 1 of 3 at once with 2 workers"]
    attempts = [line.split(" ", 2) for rank in (0, 1) for line in ended.of(rank)]
    assert sorted({number for number, *_ in attempts}) == ["0", "1"]
    assert len({run_id for _, run_id, _ in attempts}) == 1
    addresses = {number: cluster for number, _, cluster in attempts}
    assert len(set(addresses.values())) == 2, "fresh ports"


def test_no_restart_by_default_and_a_new_id_for_each_run(run):
    runs = [run("say(os.environ['TFDIST_RUN_ID']); beat(step=1); die()", workers=1) for _ in range(2)]
    assert len({ended.out[0] for ended in runs}) == 2
    for ended in runs:
        assert ended.code == 137
        assert not any("restart" in line for line in ended.said)


def test_restarts_end(run):
    ended = run("beat(step=ATTEMPT); sys.exit(10 + ATTEMPT)", "--max-restarts", "2", *NO_DELAY, workers=1)
    assert ended.code == 12
    assert restart_lines(ended) == [f"restart {n} of 2 at once with 1 worker" for n in (1, 2)]
    causes = [line for line in ended.said if "failed first" in line]
    assert causes == [f"worker 0 failed first: exit code {10 + n}. It printed nothing." for n in (0, 1, 2)]
    assert ended.said[-1] == "no restart: all restarts are used (--max-restarts 2)"


def test_no_progress_ends_the_run(run, tmp_path):
    script = "note(f'started-{ATTEMPT}'); beat(step=41, saved=4); sys.exit(3)"
    ended = run(script, "--max-restarts", "9", *NO_DELAY, workers=1)
    assert ended.code == 3
    assert len(restart_lines(ended)) == 2
    assert len(list(tmp_path.glob("started-*"))) == 3
    assert "made no progress (none got beyond step 41, none saved a new checkpoint)" in ended.said[-1]


def test_workers_killed_from_outside_are_restarted_as_often_as_asked(run, tmp_path):
    script = "note(f'started-{ATTEMPT}'); beat(step=41, saved=4); die()"
    ended = run(script, "--max-restarts", "4", *NO_DELAY, workers=1)
    assert ended.code == 137
    assert len(list(tmp_path.glob("started-*"))) == 5
    assert ended.said[-1] == "no restart: all restarts are used (--max-restarts 4)"


def test_a_later_fit_of_the_script_is_progress(run, tmp_path):
    """Each attempt skips the first one, which is complete, and continues in the second, whose steps start at 0."""
    script = """
        from tfdist.cluster.heartbeat import Heartbeat
        for steps in ([900], range(10 * ATTEMPT)) if ATTEMPT else ([900],):
            heartbeat = Heartbeat.from_environment()
            heartbeat.start()
            for step in steps:
                heartbeat.step(step)
        sys.exit(5)
    """
    ended = run(script, "--max-restarts", "3", "--error-file", "error.json", *NO_DELAY, workers=1)
    assert ended.said[-1] == "no restart: all restarts are used (--max-restarts 3)"
    error = json.loads((tmp_path / "error.json").read_text())
    assert (error["last_fit"], error["last_step"]) == (2, 29)


def test_heartbeat_sent_just_before_the_end_counts(run):
    ended = run("beat(saved=ATTEMPT)\nif ATTEMPT < 4: die()", "--max-restarts", "4", *NO_DELAY, workers=1)
    assert ended.code == 0


def test_error_before_the_first_heartbeat_is_not_repeated(run):
    ended = run("import no_such_module", "--max-restarts", "3", *NO_DELAY)
    assert ended.code == 1
    assert not restart_lines(ended)
    assert "no restart: worker" in ended.said[-1] and "before its first heartbeat" in ended.said[-1]
    assert "  | ModuleNotFoundError: No module named 'no_such_module'" in ended.said


def test_delay_counts_from_the_failure(start, tmp_path):
    """The delay runs while the others are ended."""
    script = """
        note(f"started-{ATTEMPT}-{RANK}", time.monotonic())
        if ATTEMPT == 0:
            wait_for("started-0-1")
            if RANK == 0:
                note("failed", time.monotonic())
                die()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            hang()
    """
    run = start(script, "--max-restarts", "1", "--restart-delay", "1", "--grace", "60")
    assert run.end().code == 0
    failed, started = (float((tmp_path / name).read_text()) for name in ("failed", "started-1-0"))
    # It does not wait for the 60 s of those who save; test_run_policy.py has the exact time.
    assert 1 <= started - failed < 30


def test_what_an_attempt_leaves_behind_is_ended_before_the_next(run):
    script = """
        if ATTEMPT == 0:
            grandchild(f"child-{RANK}", start_new_session=True)
            wait_for("pid-child-0"), wait_for("pid-child-1")
            die() if RANK == 0 else hang()
        pids = [int((HERE / f"pid-child-{rank}").read_text()) for rank in (0, 1)]
        print([os.path.exists(f"/proc/{pid}") for pid in pids])
    """
    ended = run(script, "--max-restarts", "1", *NO_DELAY)
    assert (ended.code, ended.of(0), ended.of(1)) == (0, ["[False, False]"], ["[False, False]"])


def test_killed_launcher_takes_the_workers_of_a_later_attempt_with_it(start):
    script = """
        if ATTEMPT == 0:
            die()
        grandchild(f"child-{RANK}")
        note(f"up-{RANK}")
        hang()
    """
    run = start(script, "--max-restarts", "1", *NO_DELAY)
    run.wait_for("up-0", "up-1")
    run.process.kill()
    run.process.communicate()  # the fixture waits until no process is left
    assert {"pid-child-0", "pid-0-of-attempt-1"} <= set(run.pids())


def test_log_files_hold_all_attempts(run, tmp_path):
    script = "say('attempt', ATTEMPT)\nif ATTEMPT < 2: beat(step=ATTEMPT); wait_for(pid_file(1 - RANK)); die()"
    assert run(script, "--max-restarts", "2", "--log-dir", "logs", *NO_DELAY).code == 0
    for rank in (0, 1):
        text = (tmp_path / "logs" / f"rank-{rank}.log").read_text()
        times = re.sub(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", "TIME", text)
        separators = [line for line in times.splitlines() if line.startswith("====")]
        assert separators == ["==== attempt 1, TIME ====", "==== attempt 2, TIME ===="]
        assert times.splitlines()[-1] == "attempt 2"


@pytest.mark.parametrize(
    "name", ["SIGTERM", *(pytest.param(name, marks=pytest.mark.long) for name in ("SIGINT", "SIGUSR1"))]
)
def test_signal_while_waiting_to_restart(start, name):
    run = start("die()", "--max-restarts", "1", "--restart-delay", "1000", workers=1)
    said = []
    while not said or b"restart 1 of 1" not in said[-1]:
        said.append(run.process.stderr.readline())
        assert said[-1], said
    run.process.send_signal(signal.Signals[name])
    assert run.end().code == 128 + signal.Signals[name]


def test_signal_while_the_others_are_ended_leads_to_no_restart(start):
    # Worker 0 stops the launcher, which would kill it half a second later. If it is too late, another attempt follows.
    script = """
        if RANK == 1:
            wait_for(f"ready-{ATTEMPT}")
            die()
        signal.signal(signal.SIGTERM, lambda *_: (os.kill(os.getppid(), signal.SIGSTOP), note("told", ATTEMPT)))
        note(f"ready-{ATTEMPT}")
        hang()
    """
    run = start(script, "--max-restarts", "9", *NO_DELAY)
    (attempt,) = run.wait_for("told")
    run.process.send_signal(signal.SIGINT)
    run.process.send_signal(signal.SIGCONT)
    ended = run.end()
    assert ended.code == 137
    assert len(restart_lines(ended)) == int(attempt)


def test_a_smaller_attempt_and_all_workers_again(run):
    """The smaller attempt shares the cores among the workers that are left."""
    script = """
        say(os.environ["TF_NUM_INTRAOP_THREADS"], len(json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]))
        note(f"printed-{ATTEMPT}-{RANK}")
        beat(step=ATTEMPT)
        if ATTEMPT < 3:
            wait_for(f"printed-{ATTEMPT}-0")
            die() if RANK == (1 if ATTEMPT < 2 else 0) else hang()
    """
    ended = run(script, "--max-restarts", "3", "--min-workers", "1", *NO_DELAY)
    assert ended.code == 0
    assert restart_lines(ended)[1] == "restart 2 of 3 at once with 1 worker, 1 fewer than requested"
    assert [line.split()[1] for line in ended.of(0)] == ["2", "2", "1", "2"]
    shares = [int(line.split()[0]) for line in ended.of(0)]
    assert shares[2] == max(1, usable_cores()) and shares[0] == shares[3] == max(1, usable_cores() // 2)


def test_worker_that_cannot_be_started_later_is_left_out(run):
    """The first attempt leaves the launcher with room for fewer."""
    script = """
        import resource
        if ATTEMPT == 0:
            if RANK == 0:
                wait_for("pid-1"), wait_for("pid-2"), wait_for("pid-3")
                note("launcher", os.getppid())
                wait_until(lambda: state_of("launcher") == "S")  # it has started all, and waits for them
                few = (24, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
                resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, few)
                die()
            hang()
        print(len(json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]))
    """
    ended = run(script, "--max-restarts", "4", "--min-workers", "1", *NO_DELAY, workers=4)
    assert ended.code == 0
    assert re.match(r"the attempt failed: worker \d could not be started: .*Too many open files", ended.said[-2])
    assert restart_lines(ended)[1] == "restart 2 of 4 at once with 3 workers, 1 fewer than requested"
    assert int(ended.of(0)[-1]) < 4
