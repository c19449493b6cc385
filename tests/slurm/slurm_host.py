"""A host in miniature: the first process of a PID namespace, with a network, a host name and mounts of its own.

It lives as long as a pipe from this process is open, and everything on it (daemons, jobs, virtual cables, mounts) ends
with it, however this process ends.
"""

import contextlib
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable

USER, USER_ID = "trainee", 5001
LIMIT_SECONDS = 300
UNSHARE = ("unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc")
PATH = f"{pathlib.Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# `read` ends when the pipe does; bash reaps the orphans of the host meanwhile.
_FIRST_PROCESS = """
set -e
hostname "$1"
ip link set lo up
. "$2"
echo up
read -r plugged
. "$3"
while read -r line; do :; done
"""


def until(condition: Callable[[], object], what: str, limit_seconds: float = LIMIT_SECONDS) -> None:
    """Waits until a condition is true.

    Raises:
        TimeoutError: If it does not become true in time.
    """
    end = time.monotonic() + limit_seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"timed out waiting for {what}")
        time.sleep(0.1)


class Host:
    """A host in miniature.

    Args:
        name: Its name.
        run: The directory of the cluster.
        mounts: A shell script that makes its mounts.
        daemons: A shell script that starts its daemons, once it is connected.
        cgroup: The cgroup of the freezer in which it runs; None: none of its own.
    """

    def __init__(
        self, name: str, run: pathlib.Path, *, mounts: str, daemons: str, cgroup: pathlib.Path | None = None
    ) -> None:
        self.name, self.pid, self._cgroup = name, 0, cgroup
        scripts = [run / f"{name}.{kind}" for kind in ("mounts", "daemons")]
        for path, text in zip(scripts, (mounts, daemons), strict=True):
            path.write_text(text)
        unshare = list(UNSHARE)
        if cgroup is not None:
            cgroup.mkdir()
            joins = f'echo $$ >{cgroup}/cgroup.procs; exec "$@"'
            unshare = ["bash", "-c", joins, "bash", *unshare, "--cgroup"]
        with open(run / "log" / f"{name}.init", "wb") as log:
            self._unshare = subprocess.Popen(
                [*unshare, "bash", "-c", _FIRST_PROCESS, "bash", name, *map(str, scripts)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={"PATH": PATH, "LANG": "C.UTF-8"},
                bufsize=0,
                start_new_session=True,
            )
        if self._unshare.stdout.readline() != b"up\n":
            self.end()
            raise RuntimeError(f"{name} did not start: {(run / 'log' / f'{name}.init').read_text()}")
        children = pathlib.Path(f"/proc/{self._unshare.pid}/task/{self._unshare.pid}/children")
        (self.pid,) = map(int, children.read_text().split())

    @property
    def is_up(self) -> bool:
        """Whether it has power."""
        return self._unshare.poll() is None

    def plug_in(self) -> None:
        """Starts the daemons: the network is there."""
        self._unshare.stdin.write(b"plugged\n")

    def in_network(self, *command: str) -> None:
        """Runs a command of this machine in the host's network."""
        done = subprocess.run(
            ["nsenter", "--target", str(self.pid), "--net", *command], capture_output=True, text=True, timeout=60
        )
        if done.returncode:
            raise RuntimeError(f"{shlex.join(command)}: {done.stderr}")

    def command(self, *command: str, user: str, directory: pathlib.Path, **variables: str) -> list[str]:
        """Returns the command that runs a command on the host, in its environment only."""
        uid = str(USER_ID if user == USER else 0)
        own = {"HOME": str(directory), "USER": user, "LOGNAME": user, "SHELL": "/bin/bash", "PATH": PATH} | variables
        own |= {"LANG": "C.UTF-8", "TERM": "dumb"}
        return [
            *("nsenter", "--target", str(self.pid), "--net", "--mount", "--uts", "--pid"),
            # nsenter is the parent.
            *("setpriv", "--reuid", uid, "--regid", uid, "--clear-groups", "--pdeathsig", "KILL"),
            *("env", "-i", "--chdir", str(directory), *(f"{name}={value}" for name, value in own.items())),
            *command,
        ]

    def end(self) -> None:
        """Ends the host with all that runs on it at once, as a power failure does."""
        self._unshare.stdin.close()
        if self.is_up and self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self._unshare.wait(timeout=60)
        self._unshare.stdout.close()
        if self._cgroup is not None and self._cgroup.exists():
            remove_cgroup(self._cgroup)


def remove_cgroup(root: pathlib.Path) -> None:
    below = [path for path in root.rglob("*") if path.is_dir()]
    for path in (*sorted(below, key=lambda path: -len(path.parts)), root):
        until(lambda path=path: _is_removed(path), f"the end of {path}", 20)


def _is_removed(path: pathlib.Path) -> bool:
    try:
        path.rmdir()
    except OSError:  # a process that was killed has not yet gone
        return not path.exists()
    return True
