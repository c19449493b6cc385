"""`tfdist run`: checks the command and its environment, then supervises the workers."""

import argparse
import contextlib
import os
import secrets
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from tfdist import cluster
from tfdist.cluster.slurm import is_outside_allocation
from tfdist.launch.cli.run_options import apply_plan, read_node_options, start_timeout
from tfdist.launch.processes.attempt_loop import AttemptLoop
from tfdist.launch.processes.control_socket import ControlSocket
from tfdist.launch.processes.network_namespace import choose_network
from tfdist.launch.processes.output import Console, LogFiles
from tfdist.launch.processes.run_policy import RunPolicy, SingleNodePolicy
from tfdist.launch.processes.run_status import StatusLine
from tfdist.launch.processes.worker_process import WorkerEnvironments
from tfdist.launch.rendezvous.node_client import join_run
from tfdist.launch.restart.attempt_outcome import ErrorFile
from tfdist.launch.run_spec import TOKEN_VARIABLE, Role, RunSpec, count_computing, describe_jobs
from tfdist.utils.argument_checks import UsageError
from tfdist.utils.cores_and_ports import ThreadShare, usable_cores

_START_TIMEOUT_VARIABLE = "TFDIST_START_TIMEOUT"


def execute(options: argparse.Namespace) -> int:
    """Runs the workers until the run ends and returns the exit code. After a UsageError no worker was started.

    Moves this process into a network namespace if `--network` allows it, so it must be single-threaded.
    """
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        # If the parent process ignored it, the kernel would discard the workers' exit codes.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    command = _worker_command(options)
    environ = {**os.environ, **apply_plan(options)}
    _check_elastic(options)
    node = read_node_options(options, os.environ)
    _check_no_cluster(os.environ, is_one_host=node is None)
    _check_roles(options)
    spec = RunSpec.of_options(
        options,
        start_timeout=_start_timeout(options, os.environ),
        run_id=secrets.token_hex(8),
        run_seed=_seed(options, os.environ),
    )
    # The processes of this host, by their ranks if all hosts have as many workers.
    roles = spec.roles_of_nodes([spec.workers] * spec.nodes)[0 if node is None else node.rank]
    threads = ThreadShare(
        count_computing(roles), usable_cores(), spec.threads_per_worker, os.environ, who=describe_jobs(roles.values())
    )
    if node is None and options.min_workers is not None and options.min_workers > options.workers:
        raise UsageError(
            f"--min-workers exceeds --workers. Received: --workers {options.workers} --min-workers "
            f"{options.min_workers}. Expected: --min-workers of at most --workers. Correct one of them."
        )
    logs = LogFiles(options.log_dir)
    if node is None:
        logs.open(roles, attempt=0)
    error_file = ErrorFile(options.error_file, options.log_dir, is_new_run=node is None)
    has_servers = not all(role.runs_script for role in roles.values())
    network_message = choose_network(spec.network if node is None else "host", has_servers=has_servers)
    status_line = StatusLine.on(sys.stderr.fileno(), os.environ, sys.stderr.encoding)
    # srun shows the output of all its tasks as one.
    number = node.rank if node is not None and _is_slurm_step(os.environ) else None
    console = Console(sys.stdout.fileno(), sys.stderr.fileno(), status_line=status_line, node=number)
    console.say(threads.describe())
    if network_message:
        console.say(network_message)
    if is_outside_allocation(os.environ, socket.gethostname()):
        console.say(
            f"warning: the workers run on {socket.gethostname()}, which Slurm has not allocated to job "
            f"{os.environ['SLURM_JOB_ID']}. Start tfdist run by srun --ntasks=1 to run on its nodes."
        )
    try:
        with contextlib.ExitStack() as until_the_end:
            control = None
            if spec.control_socket is not None:
                control = until_the_end.enter_context(contextlib.closing(ControlSocket(Path(spec.control_socket))))
            policy: RunPolicy
            if node is None:
                policy = SingleNodePolicy(spec, error_file=error_file, say=console.say)
            else:
                policy = until_the_end.enter_context(join_run(node, spec, console, error_file=error_file))
                environ[TOKEN_VARIABLE] = node.token
            return AttemptLoop(
                command,
                WorkerEnvironments(environ, spec),
                console,
                logs,
                policy=policy,
                spec=spec,
                warm_spares=_spare_count(spec, roles) if spec.warm_spares else 0,
                control=control,
            ).run()
    except OSError as error:
        raise UsageError(
            f"The workers could not be started or watched ({error}); any that were running have been ended. Received: "
            f"--workers {spec.workers}. Expected: as many as this host has memory, processes and open files for. "
            "Start fewer, or raise the limits (ulimit -u, ulimit -n)."
        ) from error


def _check_roles(options: argparse.Namespace) -> None:
    servers = options.parameter_servers
    if options.chief and servers:
        raise UsageError(
            "Parameter servers have a chief already, and no stages of models. Received: --chief --parameter-servers "
            f"{servers}. Expected: one of them. Remove --chief for ParameterServerStrategy, --parameter-servers for "
            "ModelParallelStrategy."
        )
    if options.chief and options.min_workers is not None:
        raise UsageError(
            "--min-workers does not apply to workers that hold the stages of a model: each stage needs its worker. "
            f"Received: --chief --min-workers {options.min_workers}. Expected: no --min-workers. Remove it; a run with "
            "fewer stages or columns resumes from the same checkpoints."
        )
    if not servers:
        if options.worker_restarts is not None and options.elastic is None:
            raise UsageError(
                "Only workers beside parameter servers, and those of an elastic run, are restarted one by one. "
                f"Received: --worker-restarts {options.worker_restarts} without --parameter-servers or --elastic. "
                "Expected: it with one of them. To restart all workers use --max-restarts."
            )
        return
    if options.min_workers is not None and options.nodes == 1:
        raise UsageError(
            "--min-workers does not apply to workers beside parameter servers: the training continues with those that "
            f"run. Received: --min-workers {options.min_workers} --parameter-servers {servers}. Expected: no "
            "--min-workers. Remove it; --worker-restarts limits how often a worker is restarted."
        )


def _check_elastic(options: argparse.Namespace) -> None:
    least, most = options.elastic, options.most_workers
    if options.control_socket is not None and (least is None or options.nodes > 1):
        other = "no --elastic" if least is None else f"--nodes {options.nodes}"
        raise UsageError(
            "Only an elastic run on one host changes its number of workers while it trains. Received: --control-socket "
            f"{options.control_socket} and {other}. Expected: --elastic MIN:MAX on one host. Remove --control-socket."
        )
    if least is None:
        return
    if options.parameter_servers or options.chief:
        other = "--chief" if options.chief else f"--parameter-servers {options.parameter_servers}"
        reason = (
            "each worker of a chief holds stages of its model, which are lost with it"
            if options.chief
            else "workers beside parameter servers are always restarted alone"
        )
        raise UsageError(
            f"Only workers that all run the script train elastically: {reason}. Received: --elastic {least} {other}. "
            "Expected: one of them. Remove --elastic, or use MultiWorkerMirroredStrategy without a chief."
        )
    if options.min_workers is not None:
        raise UsageError(
            "--min-workers does not apply to an elastic run: after a failure of the attempt all workers are started "
            f"again, and --elastic says how many are enough. Received: --elastic {least} --min-workers "
            f"{options.min_workers}. Expected: one of them. Remove --min-workers."
        )
    if most is not None and options.nodes > 1:
        raise UsageError(
            "The number of workers grows on one host only. Received: "
            f"--elastic {least}:{most} --nodes {options.nodes}. Expected: --elastic {least}. Remove :{most}; workers "
            "that are lost, and hosts, join again."
        )
    if most is not None and not 2 <= options.workers <= most:
        raise UsageError(
            "A run that may grow begins with 2 to MAX workers. Received: "
            f"--workers {options.workers} --elastic {least}:{most}. Expected: --workers from 2 to {most}. Correct one "
            "of them."
        )
    if options.nodes == 1 and least > options.workers:
        raise UsageError(
            "The least number of workers that train exceeds the number of workers. Received: "
            f"--workers {options.workers} --elastic {least}. Expected: --elastic {options.workers}, or less. Correct "
            "one of them."
        )


def _spare_count(spec: RunSpec, roles: Mapping[int, Role]) -> int:
    """Returns how many processes that run the script may have to be started at once."""
    if spec.elastic is not None and not spec.max_restarts and spec.nodes == 1:
        return spec.workers - spec.elastic
    return sum(role.runs_script for role in roles.values())


def _start_timeout(options: argparse.Namespace, environ: Mapping[str, str]) -> float | None:
    text = environ.get(_START_TIMEOUT_VARIABLE, "").strip()
    try:
        return start_timeout(text) if options.start_timeout is None and text else options.start_timeout
    except argparse.ArgumentTypeError:
        raise UsageError(
            f"Invalid environment variable {_START_TIMEOUT_VARIABLE}. Received: {_START_TIMEOUT_VARIABLE}={text!r}. "
            "Expected: a number of seconds above 0, for example 300. Correct the variable, or use --start-timeout."
        ) from None


def _seed(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    if options.seed is not None:
        return int(options.seed)
    try:
        return cluster.new_seed(environ)
    except ValueError as error:
        raise UsageError(str(error)) from None


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


def _is_slurm_step(environ: Mapping[str, str]) -> bool:
    try:
        return cluster.is_slurm_step(environ)
    except ValueError:
        return False


def _check_no_cluster(environ: Mapping[str, str], *, is_one_host: bool) -> None:
    """Rejects an existing cluster, in which every process would start all workers."""
    if cluster.has_tf_config(environ):
        raise UsageError(
            f"A cluster is described already. Received: TF_CONFIG={environ['TF_CONFIG']!r} in the environment. "
            "Expected: no TF_CONFIG, because tfdist run sets it. Start the script directly (python script.py) in "
            "every process of that cluster, or unset TF_CONFIG."
        )
    if is_one_host and _is_slurm_step(environ):
        raise UsageError(
            "srun has started several tasks, and each would start all workers. Received: a Slurm step with "
            f"SLURM_PROCID={environ['SLURM_PROCID']}. Expected: a step of one task, or none. Start the script directly "
            "(srun python script.py), so that every task becomes a worker; or one supervisor on each host (--nodes). "
            "In an interactive step (srun --pty bash) add --overlap to srun, or it waits for the resources of that "
            "step: srun --overlap python script.py, or srun --overlap --ntasks=1 tfdist run .... In a batch script "
            "that was submitted within another step, unset SLURM_STEP_ID first."
        )
    if cluster.is_kubernetes_cluster(environ):
        raise UsageError(
            "A cluster of pods is described already, and each pod would start all workers. Received: "
            "TFDIST_NUM_WORKERS or TFDIST_SERVICE in the environment. Expected: neither. Start the script directly "
            "(python script.py) in every pod, or unset both."
        )
