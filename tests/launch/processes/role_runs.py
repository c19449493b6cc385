"""A chief that runs the script, workers that come and go, and parameter servers that must stay.

Where the launcher starts `tfdist.servers`, a plain script of the test runs instead: `sitecustomize` of a
directory on PYTHONPATH sees what the interpreter was asked for.
"""

import os

_SITE = """
import os, sys
if sys.orig_argv[1:] == ["-m", "tfdist.servers"]:
    os.execv(sys.executable, [sys.executable, os.path.join(os.getcwd(), "server.py")])
"""

# What chief and servers see beside the helper of all launch tests. A restarted process has another life.
_TASK = """
from worker import *
JOB, INDEX = (json.loads(os.environ["TF_CONFIG"])["task"][key] for key in ("type", "index"))
TASK = f"{JOB}-{INDEX}" if ATTEMPT == 0 else f"{JOB}-{INDEX}-of-attempt-{ATTEMPT}"
LIFE = len(list(HERE.glob(f"pid-{TASK}-life-*")))
note(f"pid-{TASK}-life-{LIFE}", os.getpid())

def kill(task, life=0):
    wait_for(f"up-{task}-life-{life}")
    os.kill(int((HERE / f"pid-{task}-life-{life}").read_text()), signal.SIGKILL)

def up(*tasks, life=0):
    for task in tasks:
        wait_for(f"up-{task}-life-{life}")
"""

_SERVE = """
from task import *
def leave(*_):
    note(f"told-{TASK}")
    os._exit(0)
signal.signal(signal.SIGTERM, leave)
def serve():
    note(f"up-{TASK}-life-{LIFE}")
    hang()
"""

ALL = ("worker-0", "worker-1", "ps-0")

QUICK = ("--heartbeat-timeout", "1", "--grace", "0.5")


def serve_by(server, tmp_path, root):
    """Lets servers run a script instead of TensorFlow's server; returns the environment for `tfdist run`."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(_SITE)
    (tmp_path / "task.py").write_text(_TASK)
    lines = [line.removeprefix(" " * 8) for line in server.splitlines()]
    (tmp_path / "server.py").write_text(_SERVE + "\n".join([*lines, "serve()"]))
    return {"PYTHONPATH": f"{site}:{root}:{os.environ.get('PYTHONPATH', '')}"}


def roles_starter(start, tmp_path, root):
    """Returns `begin(chief's script, *options, server=script)`: 2 workers and 1 parameter server, or none."""

    def begin(script, *options, server="", workers=2, servers=1, **more):
        env = {**serve_by(server, tmp_path, root), **more.pop("env", {})}
        chief = "from task import *\n" + "\n".join(line.removeprefix(" " * 8) for line in script.splitlines())
        roles = ("--parameter-servers", str(servers)) if servers else ("--chief",)
        return start(chief, *roles, *options, workers=workers, env=env, **more)

    return begin


def of(ended, label):
    return [line.removeprefix(f"[{label}] ") for line in ended.out if line.startswith(f"[{label}] ")]


def lines_of(ended, name):
    return [line for line in ended.said if line.startswith(f"{name} ")]
