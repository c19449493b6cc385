"""Which hosts may join a run, and the messages about it."""

import os
import signal
import socket
import stat

import pytest

from tfdist.launch.cli.main import main

TOKEN = "0123456789abcdef"
HANG = "note(f'up-{RANK}'); wait_for('go')"


def said_by(run, text):
    """Reads the messages of a launcher until one contains a text, and returns that."""
    lines = []
    while not lines or text not in lines[-1]:
        lines.append(run.process.stderr.readline().decode())
        assert lines[-1], lines
    return lines[-1]


def test_wrong_token(node):
    first = node(0, "print('ok')")
    ended = node(1, "pass", env={"TFDIST_TOKEN": "another token...."}).end()
    assert ended.code == 2
    assert "tfdist run: error: The token is wrong. Received: a token that the rendezvous at" in ended.err[-1]
    assert "tfdist: rendezvous: refused a connection from 127.0.0.1: wrong token" in said_by(first, "refused")
    second = node(1, "print('ok')")
    assert [first.end().of(0), second.end().of(1)] == [["ok"], ["ok"]], "the run continues"


def test_options_that_differ_from_node_0(node):
    first = node(0, HANG)
    for options, reason in (
        (("--max-restarts", "5"), "Received: --max-restarts 5. Expected: --max-restarts 0, as on node 0."),
        (("--min-workers", "1"), "Received: --min-workers 1. Expected: --min-workers (none), as on node 0."),
        (("--nodes", "3"), "Received: --nodes 3. Expected: --nodes 2, as on node 0."),
    ):
        ended = node(1, HANG, *options).end()
        assert ended.code == 2
        expected = f"The rendezvous rejects this host. {reason} Use the same options on every host."
        assert f"tfdist run: error: {expected}" in ended.err
    first.process.send_signal(signal.SIGTERM)
    assert first.end().code == 143


def test_second_host_with_the_same_rank(node):
    runs = [node(rank, HANG) for rank in (0, 1)]
    runs[0].wait_for("up-0", "up-1")
    ended = node(1, HANG).end()
    assert ended.code == 2
    assert f"Received: --node-rank 1, which {socket.gethostname()} has. Expected: a free rank." in ended.err[-1]
    (runs[0]._here / "go").touch()
    assert [run.end().code for run in runs] == [0, 0]


def test_host_that_never_joins(node):
    ended = node(0, "pass", "--start-timeout", "4").end()  # within which node 0 itself joins
    assert ended.code == 1
    assert ended.said[-2:] == ["waiting for node 1", "not started: node 1 did not join within 4 s"]


def test_rendezvous_that_never_answers(node):
    ended = node(1, "pass", "--start-timeout", "0.5").end()
    assert ended.code == 2
    assert (
        "tfdist run: error: The rendezvous did not answer. Received: Connection refused at 127.0.0.1:" in ended.err[-1]
    )


def test_host_waits_for_the_rendezvous(node):
    second = node(1, "print('ok')")
    assert "(Connection refused)" in said_by(second, "waiting for the rendezvous at 127.0.0.1:")
    first = node(0, "print('ok')")
    assert [first.end().of(0), second.end().of(1)] == [["ok"], ["ok"]]


def test_taken_port(node):
    with socket.create_server(("127.0.0.1", node.port)):
        ended = node(0, "pass").end()
    assert ended.code == 2
    assert f"The coordinator cannot listen. Received: port {node.port} (Address already in use)" in ended.err[-1]


def test_min_workers_exceeds_all_workers(node):
    runs = [node(rank, "pass", "--min-workers", "3") for rank in (0, 1)]
    ended = [run.end() for run in runs]
    assert [one.code for one in ended] == [2, 2]
    expected = "Received: --min-workers 3. Expected: at most 2, the workers of all hosts."
    assert all(expected in one.err[-1] for one in ended)


def test_killed_coordinator_ends_all(node):
    runs = [node(rank, HANG) for rank in (0, 1)]
    runs[0].wait_for("up-0", "up-1")
    os.kill(coordinator_of(runs[0], node.port), signal.SIGKILL)
    assert [run.end().code for run in runs] == [69, 69]


def test_third_signal_does_not_wait_for_others(node):
    """The coordinator is stopped, and there is no heartbeat timeout."""
    runs = [node(rank, HANG, "--heartbeat-timeout", "0") for rank in (0, 1)]
    runs[0].wait_for("up-0", "up-1")
    coordinator = coordinator_of(runs[0], node.port)
    os.kill(coordinator, signal.SIGSTOP)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        runs[1].process.send_signal(number)
    assert runs[1].end().code == 69
    os.kill(coordinator, signal.SIGKILL)
    assert runs[0].end().code == 69


def coordinator_of(run, port):
    """The process id of the coordinator beside a launcher."""
    pid = run.process.pid
    with open(f"/proc/{pid}/task/{pid}/children") as listing:
        children = [int(child) for child in listing.read().split()]
    (found,) = [child for child in children if listens_on(child, port)]
    return found


def listens_on(pid, port):
    """Whether a process has a listening socket of that port."""
    with open("/proc/net/tcp") as table:
        rows = [line.split() for line in table][1:]
    inodes = {row[9] for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port}
    links = {_link(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
    return any(f"socket:[{inode}]" in links for inode in inodes)


def _link(path):
    try:
        return os.readlink(path)
    except FileNotFoundError:  # closed meanwhile
        return ""


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """Runs an invalid command in this process and returns its message."""
    for name in list(os.environ):
        if name.startswith(("TF_CONFIG", "TFDIST_", "SLURM_", "JOB_COMPLETION_INDEX")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").touch()

    def message(*options, token=TOKEN, where=("--node-rank", "0", "--rendezvous", "127.0.0.1:1"), **environ):
        monkeypatch.setenv("TFDIST_TOKEN", token)
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        assert main(["run", "--workers", "2", "--nodes", "2", *where, *options, "script.py"]) == 2
        return " ".join(capsys.readouterr().err.split("\n"))

    return message


@pytest.mark.parametrize("token", ["", "   ", "fifteen charact"])
def test_missing_or_short_token(refused, token):
    message = refused(token=token)
    how = "15 characters" if token.strip() else "nothing"
    assert f"Several hosts need a secret token. Received: {how} in the variable" in message
    assert 'python -c "import secrets; print(secrets.token_hex(16))"' in message


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe" * 20])
def test_invalid_token_file(refused, tmp_path, content):
    if content is not None:
        (tmp_path / "token").write_bytes(content)
    assert "--token-file token" in refused("--token-file", "token")


def test_token_file_beats_the_variable(node, tmp_path):
    (tmp_path / "token").write_text("the token of all hosts\n")
    (tmp_path / "token").chmod(stat.S_IRUSR)
    first = node(0, "print('ok')", "--token-file", "token", env={"TFDIST_TOKEN": ""})
    second = node(1, "print('ok')", env={"TFDIST_TOKEN": "the token of all hosts"})
    assert [first.end().of(0), second.end().of(1)] == [["ok"], ["ok"]]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"where": ("--rendezvous", "a:1")}, "Received: --nodes 2 without --node-rank."),
        ({"where": ()}, "Received: --nodes 2 without --node-rank and --rendezvous."),
        (
            {"where": ("--node-rank", "2", "--rendezvous", "a:1")},
            "--node-rank 2 --nodes 2. Expected: 0 to 1.",
        ),
        ({"where": ("--node-rank", "0", "--rendezvous", "a")}, "Received: --rendezvous a. Expected: HOST:PORT"),
        ({"where": ("--node-rank", "0", "--rendezvous", "a:70000")}, "Received: --rendezvous a:70000."),
    ],
)
def test_wrong_options(refused, options, reason):
    assert reason in refused(**options)


def test_private_network(refused):
    assert "Received: --nodes 2 --network private." in refused("--network", "private")


def test_invalid_start_timeout_variable(refused):
    where = ("--node-rank", "1", "--rendezvous", "127.0.0.1:1")
    assert "Received: TFDIST_START_TIMEOUT='soon'." in refused(where=where, TFDIST_START_TIMEOUT="soon")


def test_the_token_of_the_rendezvous_is_not_passed_to_workers(run):
    """They get another one, random or derived from it, which is different in each run."""
    seen = set()
    for options, environ in (("--nodes", "1", "--node-rank", "0"), {}), ((), {"TFDIST_TOKEN": TOKEN}), ((), {}):
        ended = run("print(os.environ['TFDIST_TOKEN'])", *options, workers=1, env=environ)
        assert ended.code == 0
        seen |= {line.removeprefix("[0] ") for line in ended.out}
    assert len(seen) == 3 and TOKEN not in seen and all(len(token) == 64 for token in seen)


def test_one_supervisor_per_host_in_a_slurm_step(node):
    """`srun --ntasks-per-node=1 tfdist run --nodes …` starts one supervisor on each host."""
    slurm = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "3"}
    runs = [node(rank, "print('ok')", env={**slurm, "SLURM_PROCID": str(rank)}) for rank in (0, 1)]
    assert [run.end().of(rank) for rank, run in enumerate(runs)] == [["ok"], ["ok"]]


def test_address_of_the_workers(node):
    script = "print(json.loads(os.environ['TF_CONFIG'])['cluster']['worker'])"
    runs = [node(0, script), node(1, script, "--address", "127.0.0.7")]
    for rank, run in enumerate(runs):
        (line,) = run.end().of(rank)
        assert [address.partition(":")[0] for address in eval(line)] == ["127.0.0.1", "127.0.0.7"]
