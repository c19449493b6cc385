"""A real Slurm on this machine: a login host and nodes in namespaces (`slurm_host.py`). The machine does not change."""

import dataclasses
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator

from child_environment import ROOT, SUPPORT
from slurm_host import LIMIT_SECONDS, PATH, UNSHARE, USER, USER_ID, Host, remove_cgroup, until

NODES = ("tf-n1", "tf-n2")
_LOGIN, _LOGIN_ADDRESS = "tf-login", "10.88.0.254"
_ADDRESSES = {name: f"10.88.0.{number}" for number, name in enumerate(NODES, 1)}
_PROGRAMS = ("slurmctld", "slurmd", "munged", "srun", "ip", "unshare", "nsenter", "setpriv")
_FREEZER = pathlib.Path("/sys/fs/cgroup/freezer")

_SLURM_CONF = """
ClusterName=trial
SlurmctldHost={login}({login_address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A requeued job waits until its old credential has expired, by default for two minutes.
AuthInfo=socket={run}/munge/socket,cred_expire=5
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/{proctrack}
TaskPlugin=task/{task_plugin}
SwitchType=switch/none
# The nodes claim more CPUs than the machine has (config_overrides: slurmd believes slurm.conf).
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=bf_interval=2,sched_interval=2,batch_sched_delay=0,sched_min_interval=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{more}
KillWait=30
MinJobAge=600
ReturnToService=2
SlurmdTimeout=10
InactiveLimit=0
StateSaveLocation={run}/state
SlurmdSpoolDir={run}/spool.%n
SlurmctldPidFile={run}/slurmctld.pid
SlurmdPidFile={run}/slurmd.%n.pid
SlurmctldLogFile={run}/log/slurmctld
SlurmdLogFile={run}/log/slurmd.%n
SlurmdDebug=debug
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60 OverTimeLimit=0
PartitionName=urgent Nodes=ALL Default=NO MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""
_CGROUP_CONF = "CgroupAutomount=no\nCgroupPlugin=cgroup/v1\nConstrainCores=no\nConstrainRAMSpace=no\n"


def why_not(proctrack: str = "linuxproc") -> str:
    """Why no Slurm can be started here; empty if one can."""
    missing = [program for program in _PROGRAMS if shutil.which(program, path=f"{PATH}:{os.environ['PATH']}") is None]
    if os.geteuid():
        return "the hosts of a Slurm are namespaces, which take root"
    if missing:
        return f"there is no {', '.join(missing)} (Debian: slurm-wlm, munge, iproute2)"
    if proctrack == "cgroup" and not (_FREEZER / "cgroup.procs").exists():
        return "this machine has no freezer of cgroup v1"
    command = [*UNSHARE, "ip", "link", "add", "type", "bridge"]
    tried = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return f"this machine permits no namespaces: {tried.stderr.strip()}" if tried.returncode else ""


@dataclasses.dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    code: int
    out: str
    err: str


class Job:
    """A batch job.

    Args:
        cluster: Its cluster.
        name: Its id, in an array with the number of the task.
        directory: Its working directory.
    """

    def __init__(self, cluster: "SlurmCluster", name: str, directory: pathlib.Path) -> None:
        self.cluster, self.name, self.directory = cluster, name, directory

    def show(self, key: str) -> str:
        """Returns a value that `scontrol show job` shows, such as `JobState`."""
        found = re.search(rf"\b{key}=(\S*)", self.cluster.admin("scontrol", "show", "job", self.name))
        return found[1] if found else ""

    @property
    def state(self) -> str:
        """Its state, such as `RUNNING`."""
        return self.show("JobState")

    @property
    def restarts(self) -> int:
        """How often it was requeued."""
        return int(self.show("Restarts") or 0)

    @property
    def output(self) -> str:
        """What it has printed."""
        path = self.directory / f"{self.name}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Waits for something, and shows the job if it does not happen."""
        try:
            until(condition, what)
        except TimeoutError as error:
            shown = self.cluster.admin("scontrol", "show", "job", self.name)
            raise TimeoutError(f"{error}; its output:\n{self.output}\n{shown}") from error

    def until_state(self, *states: str) -> str:
        """Waits until it is in one of some states, and returns that."""
        self.until(lambda: self.state in states, f"job {self.name} to be {' or '.join(states)}")
        return self.state

    def until_files(self, *names: str) -> None:
        """Waits for files in its directory."""
        for name in names:
            self.until((self.directory / name).exists, name)


class SlurmCluster:
    """A controller, which is the login host, and two nodes.

    Args:
        proctrack: `linuxproc` or `cgroup`: how Slurm finds the processes of a step.
        more: Further lines of slurm.conf.
    """

    def __init__(self, proctrack: str = "linuxproc", more: str = "") -> None:
        remove_leftovers()
        self.proctrack = proctrack
        self.run_directory = pathlib.Path(tempfile.mkdtemp(prefix="tfdist-slurm-"))
        (self.run_directory / "owner").write_text(str(os.getpid()))
        self.home = self.run_directory / "home"
        self._hosts: dict[str, Host] = {}
        self._commands: list[subprocess.Popen[str]] = []
        try:
            self._write_files(more)
            self._start(_LOGIN)
            until(self._has_munge, "munged", 30)
            for name in NODES:
                self._start(name)
            until(lambda: self.idle_nodes() == len(NODES), "all nodes to be idle", 60)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Ends everything, and removes its files."""
        self._kill_commands()
        for host in reversed(list(self._hosts.values())):
            host.end()
        shutil.rmtree(self.run_directory)

    def host_pids(self) -> dict[str, int]:
        """Returns the first process of each host."""
        return {name: host.pid for name, host in self._hosts.items()}

    # Commands

    def start(
        self,
        *command: str,
        host: str = _LOGIN,
        user: str = USER,
        directory: pathlib.Path | None = None,
        **variables: str,
    ) -> "subprocess.Popen[str]":
        """Starts a command on a host, as a user, in an environment of its own."""
        variables = {"TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(SUPPORT), "PYTHONUNBUFFERED": "1"} | variables
        self._commands.append(
            subprocess.Popen(
                self._hosts[host].command(*command, user=user, directory=directory or self.home, **variables),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return self._commands[-1]

    def run(self, *command: str, limit_seconds: float = LIMIT_SECONDS, **options: object) -> Ended:
        """Runs a command on a host, as a user, to its end."""
        process = self.start(*command, **options)
        out, err = process.communicate(timeout=limit_seconds)
        self._commands.remove(process)
        return Ended(process.returncode, out, err)

    def admin(self, *command: str) -> str:
        """Runs a command of Slurm as its administrator and returns its output."""
        ended = self.run(*command, user="root", limit_seconds=60)
        if ended.code:
            raise RuntimeError(f"{shlex.join(command)} has exited with {ended.code}: {ended.err}")
        return ended.out

    def idle_nodes(self) -> int:
        """Returns the number of idle nodes."""
        ended = self.run("sinfo", "-h", "-N", "-t", "idle", "-p", "main", "-o", "%N", user="root")
        return len(set(ended.out.split()))

    def submit(self, script: str, *arguments: str, directory: pathlib.Path, options: tuple[str, ...] = ()) -> Job:
        """Submits a batch script as the user; its output is in `<id>.out`, in an array in `<id>_<task>.out`."""
        output = "%A_%a.out" if any(option.startswith("--array") for option in options) else "%j.out"
        ended = self.run(
            "sbatch", "--parsable", f"--output={output}", *options, script, *arguments, directory=directory
        )
        if ended.code:
            raise RuntimeError(f"sbatch has exited with {ended.code}: {ended.err}")
        return Job(self, ended.out.strip(), directory)

    def make_directory(self, name: str) -> pathlib.Path:
        """Returns a new directory of the user, which all hosts share."""
        directory = self.home / name
        directory.mkdir()
        os.chown(directory, USER_ID, USER_ID)
        return directory

    def clean(self) -> None:
        """Ends all jobs, and repairs all faults."""
        self._kill_commands()
        self.name_hosts(*NODES)
        for name in NODES:
            if not self._hosts[name].is_up:
                self.boot(name)
            self.plug(name)
        for job in self.admin("squeue", "-h", "-o", "%A").split():
            self.run("scancel", "--signal=KILL", "--full", job, user="root")
            self.run("scancel", job, user="root")
        until(lambda: self.idle_nodes() == len(NODES), "all nodes to be idle", 90)

    # Faults

    def unplug(self, node: str) -> None:
        """Cuts the cable of a node."""
        self._hosts[_LOGIN].in_network("ip", "link", "set", f"to-{node}", "down")

    def plug(self, node: str) -> None:
        """Mends it."""
        self._hosts[_LOGIN].in_network("ip", "link", "set", f"to-{node}", "up")

    def crash(self, node: str) -> None:
        """Lets a node lose its power."""
        self._hosts[node].end()

    def boot(self, node: str) -> None:
        """Starts a node again."""
        self._start(node)

    # Parts

    def _kill_commands(self) -> None:
        for command in self._commands:
            if command.poll() is None:
                command.kill()
            command.wait(timeout=60)
            for pipe in (command.stdout, command.stderr):
                pipe.close()
        self._commands = []

    def _write_files(self, more: str) -> None:
        run = self.run_directory
        run.chmod(0o755)
        for name in ("log", "state", "etc", "munge", "home"):
            (run / name).mkdir()
        os.chown(self.home, USER_ID, USER_ID)
        key = run / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        etc = run / "etc"
        passwd, group = pathlib.Path("/etc/passwd").read_text(), pathlib.Path("/etc/group").read_text()
        (etc / "passwd").write_text(f"{passwd}{USER}:x:{USER_ID}:{USER_ID}::{self.home}:/bin/bash\n")
        (etc / "group").write_text(f"{group}{USER}:x:{USER_ID}:\n")
        (etc / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n")  # no name server is there
        self.name_hosts(*NODES)
        (etc / "cgroup.conf").write_text(_CGROUP_CONF)
        lines = [f"NodeName={name} NodeAddr={address} CPUs=16 RealMemory=8000" for name, address in _ADDRESSES.items()]
        (etc / "slurm.conf").write_text(
            _SLURM_CONF.format(
                login=_LOGIN,
                login_address=_LOGIN_ADDRESS,
                run=run,
                proctrack=self.proctrack,
                task_plugin="affinity" if self.proctrack == "cgroup" else "none",
                nodes="\n".join(lines),
                more=more,
            )
        )

    def name_hosts(self, *nodes: str) -> None:
        """Lets the names of some nodes resolve, and no others."""
        known = {"localhost": "127.0.0.1", _LOGIN: _LOGIN_ADDRESS} | {name: _ADDRESSES[name] for name in nodes}
        # In place: the hosts have mounted this file.
        (self.run_directory / "etc" / "hosts").write_text("".join(f"{known[name]} {name}\n" for name in known))

    def _has_munge(self) -> bool:
        socket = self.run_directory / "munge" / "socket"
        return subprocess.run(["munge", "-n", "-S", str(socket)], capture_output=True, timeout=60).returncode == 0

    def _start(self, name: str) -> None:
        run = self.run_directory
        if name == _LOGIN:
            munge = run / "munge"
            paths = {option: munge / option for option in ("socket", "pid", "log", "seed", "key")}
            files = " ".join(f"--{o}{'' if o == 'socket' else '-file'}={path}" for o, path in paths.items())
            daemons = [f"munged --foreground --force {files}", "slurmctld -D"]
        else:
            daemons = [f"slurmd -D -N {name}"]
        log = run / "log" / f"{name}.daemons"
        is_limited = self.proctrack == "cgroup" and name != _LOGIN
        host = self._hosts[name] = Host(
            name,
            run,
            mounts="\n".join(_mounts(run, has_cgroup=is_limited)),
            daemons="".join(f"{daemon} </dev/null >>{log} 2>&1 &\n" for daemon in daemons),
            cgroup=_FREEZER / f"{run.name}-{name}" if is_limited else None,
        )
        if name == _LOGIN:
            host.in_network("ip", "link", "add", "bridge", "type", "bridge")
            host.in_network("ip", "address", "add", f"{_LOGIN_ADDRESS}/24", "dev", "bridge")
            host.in_network("ip", "link", "set", "bridge", "up")
        else:
            login, cable = self._hosts[_LOGIN], f"to-{name}"
            login.in_network(*f"ip link add {cable} type veth peer name eth0 netns {host.pid}".split())
            login.in_network(*f"ip link set {cable} master bridge up".split())
            host.in_network(*f"ip address add {_ADDRESSES[name]}/24 dev eth0".split())
            host.in_network(*"ip link set eth0 up".split())
        host.plug_in()


def _mounts(run: pathlib.Path, *, has_cgroup: bool) -> Iterator[str]:
    """Yields the lines of a host's mounts: its files in /etc, and what an ordinary user must see."""
    for name in ("passwd", "group", "hosts", "nsswitch.conf"):
        yield f"mount --bind {run}/etc/{name} /etc/{name}"
    yield f"mount --bind {run}/etc /etc/slurm"
    needed = {pathlib.Path(path) for path in (sys.base_prefix, sys.prefix, ROOT)}
    for hidden in sorted({path for path in map(_hidden_parent, needed) if path is not None}):
        below = sorted(path for path in needed if path.is_relative_to(hidden))
        for number, path in enumerate(below):
            yield f"mkdir -p {run}/visible/{number} && mount --bind {path} {run}/visible/{number}"
        yield f"mount -t tmpfs -o mode=755 none {hidden}"
        for number, path in enumerate(below):
            yield f"mkdir -p {path} && mount --bind {run}/visible/{number} {path} && umount {run}/visible/{number}"
    if has_cgroup:
        yield "mount -t tmpfs none /sys/fs/cgroup && mkdir /sys/fs/cgroup/freezer"
        yield "mount -t cgroup -o freezer none /sys/fs/cgroup/freezer"


def _hidden_parent(path: pathlib.Path) -> pathlib.Path | None:
    """Returns the outermost directory on the way to `path` that an ordinary user cannot enter."""
    return next((parent for parent in reversed(path.parents) if not parent.stat().st_mode & 0o001), None)


def remove_leftovers() -> None:
    """Removes the directories and empty cgroups of clusters whose tests were killed; their processes have ended."""
    for directory in pathlib.Path(tempfile.gettempdir()).glob("tfdist-slurm-*"):
        if not _is_used(directory):
            for cgroup in _FREEZER.glob(f"{directory.name}-*"):
                remove_cgroup(cgroup)
            shutil.rmtree(directory)


def _is_used(directory: pathlib.Path) -> bool:
    """Whether the process that has created the directory runs."""
    try:
        return os.path.exists(f"/proc/{int((directory / 'owner').read_text())}")
    except (OSError, ValueError):
        return True  # it is about to be created or removed
