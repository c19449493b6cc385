"""`tfdist run`: its options, and what is checked before anything is started."""

import argparse
import math
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tfdist import cluster
from tfdist.launch.cores import ThreadShare, usable_cores
from tfdist.launch.errors import UsageError
from tfdist.launch.network_namespace import choose_network
from tfdist.launch.output import Console, open_logs
from tfdist.launch.ports import ReservedPorts
from tfdist.launch.supervisor import Supervisor

_DESCRIPTION = """\
Start WORKERS processes of a script on this host, each with its TF_CONFIG, and watch them.

Every line of a worker is shown behind its rank: "[0] ...". When a worker fails, its rank, its exit code or signal and
its last lines are reported, the others are ended (SIGTERM, after the grace SIGKILL), and its exit code becomes that
of this command (128 + number for a signal). Ctrl-C ends all workers, a second Ctrl-C kills them at once. No worker
outlives this command."""

_EPILOG = """\
examples:
  tfdist run --workers 2 train.py --epochs 10
  tfdist run --workers 4 --log-dir logs -m my_package.train --epochs 10
  tfdist run --workers 2 --network host download_and_train.py

Everything after the script (or after -m MODULE) is the script's own."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the sub-command `run`."""
    parser = commands.add_parser(
        "run",
        help="start the workers of a script on this host and watch them",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="tfdist run --workers N [options] (script.py | -m module) [arguments ...]",
        allow_abbrev=False,
    )
    at_least_one = _number(int, at_least=1, expected="a whole number of at least 1, for example 2")
    seconds = _number(float, at_least=0, expected="seconds, a number of at least 0, for example 5")
    parser.add_argument("--workers", type=at_least_one, required=True, metavar="N", help="number of workers to start")
    parser.add_argument("--log-dir", type=Path, metavar="DIR", help="also write DIR/rank-<rank>.log (default: none)")
    parser.add_argument(
        "--start-timeout",
        type=seconds,
        metavar="S",
        help="seconds after which a worker whose peers never came up ends with an error (default: 300)",
    )
    parser.add_argument(
        "--grace",
        type=seconds,
        default=5.0,
        metavar="S",
        help="seconds between SIGTERM and SIGKILL when workers are ended (default: 5)",
    )
    parser.add_argument(
        "--network",
        choices=("auto", "private", "host"),
        default="auto",
        help="private: a network namespace of the run's own, where only its workers reach each other; host: this "
        "host's network, for scripts that need the internet; auto: private where permitted, else host with a "
        "warning (default: auto)",
    )
    parser.add_argument(
        "--threads-per-worker",
        type=at_least_one,
        metavar="T",
        help="threads of each worker (default: usable cores / workers, unless the environment already says)",
    )
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, metavar="module", help="as python -m module")
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="script.py", help="the script and its arguments")
    parser.set_defaults(execute=execute)


def execute(options: argparse.Namespace) -> int:
    """Runs the workers to their end and returns the exit code.

    Moves this process into a network namespace where `--network` allows it, so it must be single-threaded.

    Raises:
        UsageError: If the command or the environment is wrong. Nothing was started then.
    """
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        # Ignored by whoever started this process, the kernel would throw the workers' exit codes away.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    command = _worker_command(options)
    _check_no_cluster(os.environ)
    threads = ThreadShare(options.workers, usable_cores(), options.threads_per_worker, os.environ)
    logs = open_logs(options.log_dir, options.workers)
    network = choose_network(options.network)
    console = Console(sys.stdout.fileno(), sys.stderr.fileno())
    console.say(threads.describe())
    console.say(network.describe())

    base = {**os.environ, **threads.environment(), "PYTHONUNBUFFERED": "1"}
    if options.start_timeout is not None or "TFDIST_START_TIMEOUT" not in base:
        base["TFDIST_START_TIMEOUT"] = f"{300 if options.start_timeout is None else options.start_timeout:g}"
    try:
        with ReservedPorts(options.workers) as reserved:
            spec = cluster.ClusterSpec({"worker": [f"127.0.0.1:{port}" for port in reserved.ports]})
        environments = [
            {**base, "TF_CONFIG": cluster.ClusterConfig(spec, task).to_tf_config()} for task in spec.workers
        ]
        return Supervisor(command, environments, console, logs, grace_seconds=options.grace).run()
    except OSError as error:
        raise UsageError(
            f"The workers could not be started or watched ({error}); any that were running have been ended. Received: "
            f"--workers {options.workers}. Expected: as many as this host has memory, processes and open files for. "
            "Start fewer, or raise the limits (ulimit -u, ulimit -n)."
        ) from error


def _worker_command(options: argparse.Namespace) -> list[str]:
    if options.module is not None:
        if not options.module or options.module[0].startswith("-"):
            raise UsageError(
                f"The module is missing. Received: -m {' '.join(options.module)}. Expected: -m MODULE [arguments], for "
                "example -m my_package.train. Options of tfdist run come before -m."
            )
        return [sys.executable, "-m", *options.module]
    arguments = options.script[1:] if options.script[:1] == ["--"] else options.script
    if not arguments:
        raise UsageError(
            "The script is missing. Received: no script and no -m. Expected: tfdist run --workers N script.py "
            "[arguments]. Name the script after the options."
        )
    script = arguments[0]
    if script.startswith("-"):
        raise UsageError(
            f"Unknown option. Received: {script}. Expected: one of those in tfdist run --help, then the script. "
            "Options of the script come after its name."
        )
    if not os.path.exists(script):
        raise UsageError(
            f"The script does not exist. Received: {script!r} in {os.getcwd()!r}. Expected: the path of a Python file. "
            "Correct the path, or use -m for a module."
        )
    if not os.path.isfile(script):
        raise UsageError(
            f"The script is not a file. Received: {script!r}. Expected: the path of a Python file. For a package use "
            "-m with its name."
        )
    return [sys.executable, *arguments]


def _check_no_cluster(environ: Mapping[str, str]) -> None:
    """Refuses to start workers where each process of an existing cluster would start them again."""
    if cluster.has_tf_config(environ):
        raise UsageError(
            f"A cluster is described already. Received: TF_CONFIG={environ['TF_CONFIG']!r} in the environment. "
            "Expected: no TF_CONFIG, because tfdist run makes its own. Start the script directly (python script.py) in "
            "every process of that cluster, or unset TF_CONFIG."
        )
    try:
        in_step = cluster.is_slurm_step(environ)
    except ValueError:
        in_step = False
    if in_step:
        raise UsageError(
            "srun has started several tasks already, and each would start all workers again. Received: a Slurm step "
            f"with SLURM_PROCID={environ['SLURM_PROCID']}. Expected: a step of one task, or none. Start the script "
            "directly (srun python script.py): every task becomes a worker."
        )
    if cluster.is_kubernetes_cluster(environ):
        raise UsageError(
            "A cluster of pods is described already, and each pod would start all workers again. Received: "
            "TFDIST_NUM_WORKERS or TFDIST_SERVICE in the environment. Expected: neither. Start the script directly "
            "(python script.py) in every pod, or unset both."
        )


def _number(kind: type[int] | type[float], *, at_least: float, expected: str) -> Callable[[str], Any]:
    def parse(text: str) -> int | float:
        try:
            number = kind(text)
        except ValueError:
            number = kind(-1)
        if not at_least <= number < math.inf:
            raise argparse.ArgumentTypeError(f"The number is wrong. Received: {text!r}. Expected: {expected}.")
        return number

    return parse
