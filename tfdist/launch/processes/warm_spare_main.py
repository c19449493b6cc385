"""The program of a warm spare: imports the libraries that take long, waits, and then runs the worker's command.

Run it by its path, not by `-m`, so that it can set up the script's search path before it imports anything:

    python warm_spare_main.py FD (script.py | -m module) [arguments ...]

`FD` is a stream socket. The spare writes one byte when its imports are complete. To turn it into a worker, the
supervisor writes the environment as JSON and closes its end.
"""

import importlib
import json
import os
import runpy
import socket
import sys
import types
from collections.abc import Sequence

# Imported by name, as a script does: a module of that name beside the script is found first.
_IMPORTS = ("tensorflow", "keras", "tfdist.strategies", "tfdist.callbacks")


def main(fd: int, command: Sequence[str]) -> None:
    """Waits for the environment and runs the command as `python` would."""
    is_module = command[0] == "-m"
    sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.realpath(command[0]))
    sys.argv = list(command[1:] if is_module else command)
    for name in _IMPORTS:
        try:
            importlib.import_module(name)
        except Exception:  # the script reports it if it needs the module
            break
    with socket.socket(fileno=fd) as supervisor:
        supervisor.sendall(b"w")
        with supervisor.makefile("rb") as reader:
            environment = reader.read()
    if not environment:
        return
    heartbeat = {name: os.environ[name] for name in os.environ if name.startswith("TFDIST_HEARTBEAT_")}
    os.environ.update(json.loads(environment) | heartbeat)
    if is_module:
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        _run_script(command[0])


def _run_script(path: str) -> None:
    """Runs a script as `__main__`. runpy would remove the module before the last threads and exit handlers end."""
    module = types.ModuleType("__main__")
    module.__file__ = os.path.abspath(path)
    sys.modules["__main__"] = module
    with open(path, "rb") as script:
        code = compile(script.read(), module.__file__, "exec")
    exec(code, module.__dict__)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
