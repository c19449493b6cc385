"""One worker: its environment, a process that leads its own session, and all processes that it starts."""

import contextlib
import hmac
import os
import secrets
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tfdist.cluster import MEMORY_VARIABLE, SEED_VARIABLE, ClusterConfig, ClusterSpec
from tfdist.cluster.heartbeat import VARIABLE
from tfdist.launch.processes.orphan_reaper import memory_directory
from tfdist.launch.processes.run_policy import AttemptStart
from tfdist.launch.run_spec import TOKEN_VARIABLE, RunSpec, count_computing
from tfdist.utils.cores_and_ports import ThreadShare, usable_cores
from tfdist.utils.linux_syscalls import die_with_parent, pidfd_open

# glibc keeps a pool of freed memory for each thread: much memory, where tensors are as large as those of stages.
_ALLOCATOR_POOLS = "MALLOC_ARENA_MAX"
_ELASTIC = "TFDIST_ELASTIC"
_BEGINNING = "TFDIST_ELASTIC_WORKERS"
_NOT_INHERITED = (TOKEN_VARIABLE, _BEGINNING)
_TOKEN_BYTES = 32
_MAX_DATAGRAM_BYTES = 65_536
_MAX_DATAGRAMS = 1_000  # per call, so that a worker that floods its socket does not block the launcher


class WorkerProcess:
    """A running worker.

    The process leads a session, so that a signal can be sent to it and all its children, and Ctrl-C on the terminal
    reaches the launcher only. The kernel kills it when the launcher dies. Start it from the launcher's main thread,
    because the kernel watches the thread. Its environment is complete but for the number of its heartbeat socket.
    """

    def __init__(
        self, rank: int, command: Sequence[str], environ: Mapping[str, str], *, pass_fds: Sequence[int] = ()
    ) -> None:
        self.rank = rank
        launcher = os.getpid()
        self.heartbeats, worker_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.heartbeats.setblocking(False)
        try:
            self._process = subprocess.Popen(
                command,
                env={**environ, VARIABLE: str(worker_end.fileno())},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
                pass_fds=(worker_end.fileno(), *pass_fds),
                preexec_fn=lambda: die_with_parent(launcher),
            )
        except BaseException:
            self.heartbeats.close()
            raise
        finally:
            worker_end.close()
        self.pid = self._process.pid
        self.pidfd = pidfd_open(self.pid)
        self.signals_sent: list[int] = []  # while it ran
        self._group_is_gone = False
        if self._process.stdout is None or self._process.stderr is None:
            raise RuntimeError("a worker was started without pipes")
        # Whether a stream is the standard error, by its descriptor.
        self.streams = {self._process.stdout.fileno(): False, self._process.stderr.fileno(): True}
        for fd in self.streams:
            os.set_blocking(fd, False)

    @property
    def returncode(self) -> int | None:
        """The exit code, or minus the signal's number, or None: as of the last `reap`."""
        return self._process.returncode

    def reap(self) -> int | None:
        """Collects the process if it has exited, and returns its `returncode`."""
        return self._process.poll()

    def wait(self, timeout_seconds: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_seconds)

    def read_heartbeats(self) -> Iterator[bytes]:
        for _ in range(_MAX_DATAGRAMS):
            try:
                yield self.heartbeats.recv(_MAX_DATAGRAM_BYTES)
            except OSError:  # none left, or the other end is closed
                return

    def is_stopped(self) -> bool:
        """Whether it is stopped, as by SIGSTOP, but not by a debugger."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_bytes()
        except OSError:
            return False
        return stat.rpartition(b")")[2].split()[:1] == [b"T"]

    def send_signal(self, number: int) -> None:
        """Sends a signal to the worker and all processes of its group."""
        if self.is_gone():
            return
        if self.returncode is None:
            self.signals_sent.append(number)
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):
            pass

    def is_gone(self) -> bool:
        """Whether the worker has been reaped and no process of its group is left."""
        if self.returncode is None:
            return False
        # Once the group is empty, another process may get its number.
        if not self._group_is_gone:
            self._group_is_gone = _is_group_empty(self.pid)
        return self._group_is_gone

    def close(self) -> None:
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()
        self.heartbeats.close()
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None


def _is_group_empty(group: int) -> bool:
    # Orphans of the worker are children of the launcher now; a zombie would count as a member.
    try:
        while os.waitpid(-group, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


class WorkerEnvironments:
    """Builds the complete environment of each process of this host.

    The processes inherit the launcher's environment, but for the token of the rendezvous: they get a token that is
    derived from it, or from a random one, and cannot join the rendezvous with it.
    """

    def __init__(self, environ: Mapping[str, str], spec: RunSpec) -> None:
        self._environ, self._spec = environ, spec
        self._token = environ.get(TOKEN_VARIABLE, "") or secrets.token_hex(_TOKEN_BYTES)

    def __call__(self, start: AttemptStart) -> dict[int, dict[str, str]]:
        """Returns the environments of an attempt, by rank."""
        roles = start.local_roles
        share = ThreadShare(
            count_computing(start.beginning_roles), usable_cores(), self._spec.threads_per_worker, self._environ
        )
        jobs: dict[str, list[str]] = {}
        for role, address in zip(start.roles.values(), start.addresses, strict=True):
            jobs.setdefault(role.task.type, []).append(address)
        cluster = ClusterSpec(jobs)
        inherited = {name: value for name, value in self._environ.items() if name not in _NOT_INHERITED}
        common = {
            **seeded_environment(inherited, start.seed),
            **share.environment(),
            "PYTHONUNBUFFERED": "1",
            "TFDIST_START_TIMEOUT": f"{self._spec.start_timeout_seconds:g}",
            "TFDIST_RUN_ID": start.run_id,
            TOKEN_VARIABLE: hmac.new(self._token.encode(), f"workers of {start.run_id}".encode(), "sha256").hexdigest(),
            "TFDIST_ATTEMPT": str(start.attempt),
            "TFDIST_FULL_WORKERS": str(start.full_workers),
        }
        if (memory := memory_directory()) is not None:
            common[MEMORY_VARIABLE] = str(memory)
        if self._spec.elastic is not None:
            common[_ELASTIC] = "1"
        if start.beginning is not None:
            common[_BEGINNING] = str(start.beginning)
        if any(role.is_server and role.task.type == "worker" for role in start.roles.values()):
            common = {_ALLOCATOR_POOLS: "1", **common}
        # TensorFlow reserves the memory of each GPU that it sees, which a worker on this host needs.
        without_gpus = {**common, "CUDA_VISIBLE_DEVICES": "-1"}
        return {
            rank: {
                **(common if role.computes else without_gpus),
                "TF_CONFIG": ClusterConfig(cluster, role.task).to_tf_config(),
            }
            for rank, role in roles.items()
        }


_START_UP = str(Path(__file__).with_name("start_up"))
_HASH_SEED = "PYTHONHASHSEED"


def seeded_environment(environ: Mapping[str, str], seed: int) -> dict[str, str]:
    """Returns `environ` for a process whose generators start from `seed`; see `start_up/sitecustomize.py`.

    Python's hashes of strings, and so the order of sets, follow from the seed, too, unless PYTHONHASHSEED is set.

    >>> seeded = seeded_environment({"PYTHONPATH": "/mine", "PYTHONHASHSEED": "random"}, 7)
    >>> seeded["TFDIST_SEED"], seeded["PYTHONHASHSEED"], seeded["PYTHONPATH"].endswith("start_up:/mine")
    ('7', 'random', True)
    >>> has_started(seeded)["PYTHONPATH"]
    '/mine'
    """
    path = os.pathsep.join(filter(None, [_START_UP, environ.get("PYTHONPATH")]))
    return {_HASH_SEED: str(seed), **environ, SEED_VARIABLE: str(seed), "PYTHONPATH": path}


def has_started(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment of `seeded_environment` as it is in the process once Python has started."""
    user_path = environ["PYTHONPATH"].removeprefix(_START_UP).removeprefix(os.pathsep)
    other_variables = {name: value for name, value in environ.items() if name != "PYTHONPATH"}
    return {**other_variables, "PYTHONPATH": user_path} if user_path else other_variables
