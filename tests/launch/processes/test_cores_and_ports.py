import json
import os
import socket

import pytest

from tfdist.utils.cores_and_ports import THREAD_VARIABLES, ReservedPorts, ThreadShare, usable_cores

SHOW = f"print(json.dumps([os.environ.get(name) for name in {THREAD_VARIABLES!r}]))"


def files(root, **contents):
    for path, text in contents.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


@pytest.fixture
def eight_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)


@pytest.mark.usefixtures("eight_cores")
@pytest.mark.parametrize(
    ("contents", "cores"),
    [
        ({}, 8),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "300000 100000\n"}, 3),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "250000 100000\n"}, 2),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": "max 100000\n"}, 8),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": "50000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/../host\n", "sys/fs/cgroup/cpu.max": "400000 100000\n"}, 4),
        (
            {
                "proc/self/cgroup": "2:cpu,cpuacct:/a\n1:name=systemd:/\n",
                "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "500000\n",
                "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000\n",
            },
            5,
        ),
        (
            {
                "proc/self/cgroup": "2:cpu,cpuacct:/a\n",
                "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000\n",
            },
            8,
        ),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": "rubbish\n"}, 8),
    ],
)
def test_usable_cores(tmp_path, contents, cores):
    assert usable_cores(files(tmp_path, **contents)) == cores


def test_cores_of_this_machine():
    assert 1 <= usable_cores() <= len(os.sched_getaffinity(0))


@pytest.mark.parametrize(("workers", "cores", "threads"), [(2, 8, 4), (3, 8, 2), (4, 2, 1), (1, 1, 1)])
def test_fair_share(workers, cores, threads):
    expected = dict.fromkeys(THREAD_VARIABLES, str(threads))
    # TensorFlow answers other workers in these threads.
    expected["TF_NUM_INTEROP_THREADS"] = str(max(2, threads))
    assert ThreadShare(workers, cores, None, {}).environment() == expected


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ((2, 2, None, {}), "2 workers, 1 thread each (2 usable cores)"),
        ((1, 1, None, {}), "1 worker, 1 thread each (1 usable core)"),
        ((2, 8, 3, {"OMP_NUM_THREADS": "7"}), "2 workers, 3 threads each (8 usable cores)"),
        (
            (2, 8, None, {"OMP_NUM_THREADS": "7"}),
            "2 workers, OMP_NUM_THREADS=7 from the environment, otherwise 4 threads each (8 usable cores)",
        ),
    ],
)
def test_the_line_says_so(arguments, line):
    assert ThreadShare(*arguments).describe() == line


def test_all_from_the_environment():
    share = ThreadShare(2, 8, None, dict.fromkeys(THREAD_VARIABLES, "5"))
    assert share.environment() == {}
    assert "TF_NUM_INTRAOP_THREADS=5" in share.describe() and "otherwise" not in share.describe()


def test_workers_get_their_share(run):
    cores = usable_cores()
    ended = run(SHOW)
    threads = max(1, cores // 2)
    expected = json.dumps([str(threads), str(max(2, threads)), str(threads)])
    assert ended.of(0) == ended.of(1) == [expected]
    assert ended.said[0].startswith("2 workers, ")


def test_what_the_user_set_is_left_alone(run):
    ended = run(SHOW, workers=1, env={"TF_NUM_INTRAOP_THREADS": "11"})
    assert ended.of(0)[0].startswith('["11", ')
    assert "TF_NUM_INTRAOP_THREADS=11 from the environment" in ended.said[0]


def test_option_beats_the_environment(run):
    ended = run(SHOW, "--threads-per-worker", "3", workers=1, env={"TF_NUM_INTRAOP_THREADS": "11"})
    assert ended.of(0) == ['["3", "3", "3"]']


def test_ports_are_held_until_released(monkeypatch):
    made = []

    class Recorded(socket.socket):
        def bind(self, address):
            made.append(self)
            super().bind(address)

    with monkeypatch.context() as patched:
        patched.setattr(socket, "socket", Recorded)
        reserved = ReservedPorts(3)
    with reserved:
        assert len(set(reserved.ports)) == 3
        for port in reserved.ports:
            with socket.socket() as other, pytest.raises(OSError):
                other.bind(("127.0.0.1", port))
    assert {holder.fileno() for holder in made} == {-1}, "closed: others may have the ports by now"


def test_a_failed_reservation_releases_what_it_had(monkeypatch):
    made = []

    class Broken(socket.socket):
        def bind(self, address):
            made.append(self)
            if len(made) == 2:
                raise OSError("no more")
            super().bind(address)

    monkeypatch.setattr(socket, "socket", Broken)
    with pytest.raises(OSError, match="no more"):
        ReservedPorts(3)
    assert [holder.fileno() for holder in made] == [-1, -1]
