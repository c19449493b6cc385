"""`tfdist run`: what is checked before anything is started, and what the workers are started with."""

import argparse
import os
import secrets
import signal
import sys
from collections.abc import Mapping

from tfdist import cluster
from tfdist.launch.cores import ThreadShare, usable_cores
from tfdist.launch.error_file import ErrorFile
from tfdist.launch.errors import UsageError
from tfdist.launch.limits import Limits
from tfdist.launch.network_namespace import choose_network
from tfdist.launch.output import Console, open_logs
from tfdist.launch.ports import ReservedPorts
from tfdist.launch.restarts import Restarts
from tfdist.launch.run_options import add_run_parser
from tfdist.launch.supervisor import Supervisor


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the sub-command `run`."""
    parser = add_run_parser(commands)
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
    min_workers = _min_workers(options)
    run_id = secrets.token_hex(8)
    logs = open_logs(options.log_dir, options.workers)
    error_file = ErrorFile(options.error_file, options.log_dir, run_id)
    network = choose_network(options.network)
    console = Console(sys.stdout.fileno(), sys.stderr.fileno())
    console.say(threads.describe())
    console.say(network.describe())

    def environments(workers: int, attempt: int) -> list[dict[str, str]]:
        share = ThreadShare(workers, usable_cores(), options.threads_per_worker, os.environ)
        with ReservedPorts(workers) as reserved:
            spec = cluster.ClusterSpec({"worker": [f"127.0.0.1:{port}" for port in reserved.ports]})
        base = {
            **os.environ,
            **share.environment(),
            "PYTHONUNBUFFERED": "1",
            "TFDIST_START_TIMEOUT": start_timeout,
            "TFDIST_RUN_ID": run_id,
            "TFDIST_ATTEMPT": str(attempt),
        }
        return [{**base, "TF_CONFIG": cluster.ClusterConfig(spec, task).to_tf_config()} for task in spec.workers]

    start_timeout = os.environ.get("TFDIST_START_TIMEOUT", "300")
    if options.start_timeout is not None:
        start_timeout = f"{options.start_timeout:g}"
    try:
        return Supervisor(
            command,
            environments,
            console,
            logs,
            workers=options.workers,
            limits=Limits(options.grace, options.heartbeat_timeout, options.stall_timeout),
            restarts=Restarts(
                workers=options.workers,
                min_workers=min_workers,
                max_restarts=options.max_restarts,
                delay_seconds=options.restart_delay,
            ),
            error_file=error_file,
            warm_spares=options.warm_spares,
        ).run()
    except OSError as error:
        raise UsageError(
            f"The workers could not be started or watched ({error}); any that were running have been ended. Received: "
            f"--workers {options.workers}. Expected: as many as this host has memory, processes and open files for. "
            "Start fewer, or raise the limits (ulimit -u, ulimit -n)."
        ) from error


def _min_workers(options: argparse.Namespace) -> int:
    number = int(options.workers if options.min_workers is None else options.min_workers)
    if number > options.workers:
        raise UsageError(
            f"There are fewer workers than the least number. Received: --workers {options.workers} --min-workers "
            f"{number}. Expected: --min-workers of at most --workers. Correct one of them."
        )
    return number


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
