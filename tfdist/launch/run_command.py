"""`tfdist run`: what is checked before anything is started, and what the workers are started with."""

import argparse
import os
import secrets
import signal
import sys
from collections.abc import Callable, Mapping, Sequence

from tfdist import cluster
from tfdist.launch.cores import ThreadShare, usable_cores
from tfdist.launch.error_file import ErrorFile
from tfdist.launch.errors import UsageError
from tfdist.launch.limits import Limits
from tfdist.launch.live_line import LiveLine
from tfdist.launch.network_namespace import choose_network
from tfdist.launch.nodes.member import Start
from tfdist.launch.nodes.node_supervisor import run_node
from tfdist.launch.nodes.options import TOKEN_VARIABLE, read_node_options
from tfdist.launch.nodes.rules import Rules
from tfdist.launch.output import Console, open_logs
from tfdist.launch.ports import ReservedPorts
from tfdist.launch.restarts import Restarts
from tfdist.launch.roles import Role, cluster_of, describe_jobs, peers, with_parameter_servers
from tfdist.launch.run_options import add_run_parser
from tfdist.launch.settlement import Settlements
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
    nodes = read_node_options(options, os.environ)
    _check_no_cluster(os.environ, is_one_host=nodes is None)
    roles = _roles(options)
    all_roles = roles(options.workers, 0)
    threads = ThreadShare(
        len(all_roles), usable_cores(), options.threads_per_worker, os.environ, who=describe_jobs(all_roles)
    )
    min_workers = _min_workers(options) if nodes is None else options.workers
    run_id = secrets.token_hex(8)
    logs = open_logs(options.log_dir, all_roles if nodes is None else ())
    error_file = ErrorFile(options.error_file, options.log_dir, is_new_run=nodes is None)
    network = choose_network(options.network if nodes is None else "host")
    live = LiveLine.on(sys.stderr.fileno(), os.environ, sys.stderr.encoding)
    console = Console(sys.stdout.fileno(), sys.stderr.fileno(), live=live)
    console.say(threads.describe())
    console.say(network.describe())

    def environments(workers: int, attempt: int) -> list[dict[str, str]]:
        present = roles(workers, 0)
        with ReservedPorts(len(present)) as reserved:
            addresses = tuple(f"127.0.0.1:{port}" for port in reserved.ports)
        return environments_on(Start(attempt, 0, len(present), addresses), present)

    def environments_on(start: Start, present: Sequence[Role] = ()) -> list[dict[str, str]]:
        share = ThreadShare(start.own_workers, usable_cores(), options.threads_per_worker, os.environ)
        present = present or peers(len(start.workers))
        spec = cluster_of(present, start.workers)
        base = {
            **{name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE},
            **share.environment(),
            "PYTHONUNBUFFERED": "1",
            "TFDIST_START_TIMEOUT": start_timeout,
            "TFDIST_RUN_ID": start.run_id or run_id,
            "TFDIST_ATTEMPT": str(start.attempt),
            "TFDIST_FULL_WORKERS": str(start.all_workers or options.workers),
        }
        own = present[start.first_rank :][: start.own_workers]
        return [{**base, "TF_CONFIG": cluster.ClusterConfig(spec, role.task).to_tf_config()} for role in own]

    start_timeout = os.environ.get("TFDIST_START_TIMEOUT", "300")
    if options.start_timeout is not None:
        start_timeout = f"{options.start_timeout:g}"
    limits = Limits(options.grace, options.heartbeat_timeout, options.stall_timeout)
    try:
        if nodes is not None:
            rules = Rules(
                run_id,
                nodes.nodes,
                options.max_restarts,
                options.min_workers,
                options.restart_delay,
                _seconds(start_timeout),
                limits,
            )
            return run_node(
                nodes,
                rules,
                command,
                environments_on,
                console,
                options.log_dir,
                workers=options.workers,
                error_file=error_file,
                warm_spares=options.warm_spares,
            )
        restarts = Restarts(
            workers=options.workers,
            min_workers=min_workers,
            max_restarts=options.max_restarts,
            delay_seconds=options.restart_delay,
        )
        return Supervisor(
            command,
            environments,
            console,
            logs,
            workers=options.workers,
            roles=roles,
            worker_restarts=options.worker_restarts,
            limits=limits,
            settlements=Settlements(restarts, run_id),
            error_file=error_file,
            warm_spares=options.warm_spares,
        ).run()
    except OSError as error:
        raise UsageError(
            f"The workers could not be started or watched ({error}); any that were running have been ended. Received: "
            f"--workers {options.workers}. Expected: as many as this host has memory, processes and open files for. "
            "Start fewer, or raise the limits (ulimit -u, ulimit -n)."
        ) from error


def _roles(options: argparse.Namespace) -> Callable[[int, int], Sequence[Role]]:
    servers = options.parameter_servers
    if not servers:
        if options.worker_restarts is not None:
            raise UsageError(
                "Only workers beside parameter servers are started again one by one. Received: --worker-restarts "
                f"{options.worker_restarts} without --parameter-servers. Expected: both, or neither. To start all "
                "workers again use --max-restarts."
            )
        return peers
    if options.min_workers is not None:
        raise UsageError(
            "Workers beside parameter servers come and go by themselves, and the training goes on with those that are "
            f"there. Received: --min-workers {options.min_workers} --parameter-servers {servers}. Expected: no "
            "--min-workers. Leave it out; --worker-restarts says how often a worker is started again."
        )
    if options.nodes > 1:
        raise UsageError(
            f"Parameter servers run on one host. Received: --nodes {options.nodes} --parameter-servers {servers}. "
            "Expected: one of them. Leave --nodes out, or start the processes with a TF_CONFIG of your own."
        )
    return lambda workers, first_rank: with_parameter_servers(workers, servers)


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(
            f"The start timeout is no number. Received: TFDIST_START_TIMEOUT={text!r}. Expected: seconds, for example "
            "300. Correct the variable, or use --start-timeout."
        ) from None


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


def _check_no_cluster(environ: Mapping[str, str], *, is_one_host: bool) -> None:
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
    if in_step and is_one_host:
        raise UsageError(
            "srun has started several tasks already, and each would start all workers again. Received: a Slurm step "
            f"with SLURM_PROCID={environ['SLURM_PROCID']}. Expected: a step of one task, or none. Start the script "
            "directly (srun python script.py): every task becomes a worker; or one supervisor on each host (--nodes)."
        )
    if cluster.is_kubernetes_cluster(environ):
        raise UsageError(
            "A cluster of pods is described already, and each pod would start all workers again. Received: "
            "TFDIST_NUM_WORKERS or TFDIST_SERVICE in the environment. Expected: neither. Start the script directly "
            "(python script.py) in every pod, or unset both."
        )
