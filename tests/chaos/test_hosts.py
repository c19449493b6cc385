"""Two hosts, simulated by network namespaces, under one run: `tfdist run --nodes 2`."""

import sys
import time

import network_namespaces
import pytest
from worker_runs import assert_as_undisturbed, command

_LIMIT_SECONDS = 1200
_TOKEN = "0123456789abcdef"
_HANGS = "import pathlib, sys, time; pathlib.Path(sys.argv[1]).touch(); time.sleep(600)"
pytestmark = [pytest.mark.multi_process, pytest.mark.timeout(2700)]


@pytest.fixture
def hosts():
    if reason := network_namespaces.why_not():
        pytest.skip(reason)
    with network_namespaces.two_hosts() as made:
        yield made


@pytest.fixture
def start(hosts, tmp_path):
    """Starts the supervisor of a host: `start(rank, arguments, environ)`, with the options for several nodes."""
    started = []

    def begin(rank, arguments, environ):
        place = arguments.index("run") + 1
        rendezvous = f"{hosts[0].address}:29400"
        options = ["--nodes", "2", "--node-rank", str(rank), "--rendezvous", rendezvous]
        shown = open(tmp_path / f"shown-{rank}.txt", "w+")
        started.append(
            (
                hosts[rank].start(
                    [*arguments[:place], *options, *arguments[place:]],
                    env={**environ, "TFDIST_TOKEN": _TOKEN},
                    stdout=shown,
                    stderr=shown,
                ),
                shown,
            )
        )
        return started[-1][0]

    yield begin
    for process, shown in started:
        process.kill()
        process.wait()
        shown.close()


def shown(folder, rank):
    return (folder / f"shown-{rank}.txt").read_text()


def until(condition):
    end = time.monotonic() + _LIMIT_SECONDS
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.02)


@pytest.mark.long
def test_training_on_two_hosts_ends_as_if_nothing_had_happened(tmp_path, start, undisturbed_workers):
    undisturbed = undisturbed_workers(2)
    plan = [{"rank": 1, "at": "on_train_batch_end", "count": 5, "do": "SIGKILL", "after_save": 3}]
    arguments, environ = command(tmp_path, "workers", 1, "--max-restarts", "1", plan=plan)
    supervisors = [start(rank, arguments, environ) for rank in (0, 1)]
    codes = [supervisor.wait(_LIMIT_SECONDS) for supervisor in supervisors]
    said = [shown(tmp_path, rank) for rank in (0, 1)]
    assert codes == [0, 0], said
    assert said[1].count("\n[1] fault: ") == 1
    assert all("failed first: killed by SIGKILL" in text for text in said)
    assert_as_undisturbed(undisturbed, tmp_path, 2, "\n".join(said))


@pytest.mark.long
def test_cable_out(tmp_path, start, hosts):
    """No connection is closed: each side detects that the other is silent."""
    environ = command(tmp_path, "workers", 1)[1]
    launcher = [sys.executable, "-m", "tfdist.launch", "run", "--workers", "1", "--heartbeat-timeout", "3"]
    (tmp_path / "hangs.py").write_text(_HANGS)
    supervisors = [
        start(rank, [*launcher, str(tmp_path / "hangs.py"), str(tmp_path / f"up-{rank}")], environ) for rank in (0, 1)
    ]
    until(lambda: all((tmp_path / f"up-{rank}").exists() for rank in (0, 1)))
    hosts[1].set_link("down")
    assert [supervisor.wait(_LIMIT_SECONDS) for supervisor in supervisors] == [1, 69]
    assert "was lost: no heartbeat for 3 s" in shown(tmp_path, 0)
    assert "the rendezvous was lost (no heartbeat for 3 s)" in shown(tmp_path, 1)
