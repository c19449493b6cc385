"""What a warm spare runs: it imports what takes long, waits, and then is the worker.

Run by its path, not by `-m`, so that the script's own search path can be set up before anything is imported:

    python spare_main.py FD (script.py | -m module) [arguments ...]

`FD` is a stream socket. The spare writes one byte when it is warm; the supervisor writes the environment as JSON and
closes its end when the spare is to become a worker.
"""

import importlib
import json
import os
import runpy
import socket
import sys
import types
from collections.abc import Sequence

# Found by name, as a script finds them: a copy beside the script comes first.
_IMPORTS = ("tensorflow", "keras", "tfdist.strategies", "tfdist.callbacks")


def main(fd: int, command: Sequence[str]) -> None:
    """Waits for its turn and runs the command as `python` would.

    Args:
        fd: The socket to the supervisor.
        command: The arguments after `python`.
    """
    is_module = command[0] == "-m"
    sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.realpath(command[0]))
    sys.argv = list(command[1:] if is_module else command)
    for name in _IMPORTS:
        try:
            importlib.import_module(name)
        except Exception:  # the script says so better, if it needs it at all
            break
    with socket.socket(fileno=fd) as supervisor:
        supervisor.sendall(b"w")
        with supervisor.makefile("rb") as reader:
            told = reader.read()
    if not told:
        return
    heartbeat = {name: os.environ[name] for name in os.environ if name.startswith("TFDIST_HEARTBEAT_")}
    os.environ.update(json.loads(told) | heartbeat)
    if is_module:
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        _run_script(command[0])


def _run_script(path: str) -> None:
    """Not by runpy, which takes the module away again before the last threads and exit handlers have ended."""
    module = types.ModuleType("__main__")
    module.__file__ = os.path.abspath(path)
    sys.modules["__main__"] = module
    with open(path, "rb") as script:
        code = compile(script.read(), module.__file__, "exec")
    exec(code, module.__dict__)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
