import json
import re
import resource
import sys

import pytest

SHOW = "print(json.dumps({name: os.environ.get(name) for name in %r}))"
SLURM = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "3"}


def test_tf_config(run):
    script = """
        import socket
        config = json.loads(os.environ["TF_CONFIG"])
        host, port = config["cluster"]["worker"][RANK].split(":")
        with socket.socket() as server:  # free, also for a server that does not share its port
            server.bind((host, int(port)))
        print(os.environ["TF_CONFIG"])
    """
    ended = run(script, workers=3)
    assert ended.code == 0, ended.err
    configs = [json.loads(ended.of(rank)[0]) for rank in range(3)]
    addresses = configs[0]["cluster"]["worker"]
    assert [config["task"] for config in configs] == [{"type": "worker", "index": rank} for rank in range(3)]
    assert all(config["cluster"] == {"worker": addresses} for config in configs)
    assert len(set(addresses)) == 3
    assert all(address.startswith("127.0.0.1:") for address in addresses)


def test_environment_of_a_worker(run):
    names = ("PYTHONUNBUFFERED", "TFDIST_START_TIMEOUT", "TF_CPP_MIN_LOG_LEVEL", "MINE")
    ended = run(SHOW % (names,), workers=1, env={"MINE": "1", "TF_CPP_MIN_LOG_LEVEL": "2"})
    assert json.loads(ended.of(0)[0]) == dict(zip(names, ("1", "300", "2", "1"), strict=True))


@pytest.mark.parametrize(
    ("options", "env", "seconds"),
    [
        ((), {}, "300"),
        (("--start-timeout", "2.5"), {}, "2.5"),
        ((), {"TFDIST_START_TIMEOUT": "7"}, "7"),
        (("--start-timeout", "20"), {"TFDIST_START_TIMEOUT": "7"}, "20"),
    ],
)
def test_start_timeout(run, options, env, seconds):
    ended = run("print(os.environ['TFDIST_START_TIMEOUT'])", *options, workers=1, env=env)
    assert ended.of(0) == [seconds]


def test_log_level_is_not_changed(run, environ):
    environ.pop("TF_CPP_MIN_LOG_LEVEL", None)
    assert run("print(os.environ.get('TF_CPP_MIN_LOG_LEVEL'))", workers=1).of(0) == ["None"]


def test_interpreter_directory_and_input(run, tmp_path):
    script = "print(sys.executable); print(os.getcwd()); print(repr(sys.stdin.read()))"
    with open(tmp_path / "input", "w+") as file:
        file.write("of the launcher")
        file.seek(0)
        ended = run(script, workers=1, stdin=file)
    assert ended.of(0) == [sys.executable, str(tmp_path), "''"]


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"TF_CONFIG": "{}"}, "A cluster is described already. Received: TF_CONFIG='{}' .*Start the script directly"),
        (SLURM, "srun has started several tasks.*SLURM_PROCID=1. Expected: a step of one task.*srun python.*--overlap"),
        ({"TFDIST_NUM_WORKERS": "2"}, "A cluster of pods is described already.*Expected: neither. Start the script"),
    ],
)
def test_existing_cluster(run, tmp_path, env, message):
    ended = run("note('started')", env=env)
    assert ended.code == 2
    assert re.match(f"tfdist run: error: .*{message}", ended.err[0])
    assert len(ended.err) == 1
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize(
    "env", [{"TF_CONFIG": ""}, {**SLURM, "SLURM_NTASKS": "1"}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}]
)
def test_no_cluster_is_described(run, env):
    assert run("pass", workers=1, env=env).code == 0


def test_more_workers_than_the_host_can_start(start):
    def few_files():
        resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))

    ended = start("hang()", workers=20, preexec_fn=few_files).end()
    assert ended.code == 2
    assert "could not be started or watched" in ended.err[-1] and "Received: --workers 20" in ended.err[-1]
