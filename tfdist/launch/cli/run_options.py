"""The options of `tfdist run`, what a plan sets of them, and what those for several hosts mean."""

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfdist.launch.restart.restart_policy import MAX_DELAY_SECONDS
from tfdist.launch.run_spec import (
    FAILURE_GRACE_SECONDS,
    RESTART_GRACE_SECONDS,
    START_TIMEOUT_SECONDS,
    STOP_GRACE_SECONDS,
    TOKEN_VARIABLE,
    NodeOptions,
    RunSpec,
)
from tfdist.planning.plans import PLAN_VARIABLE, PlanFile, Processes, best_plan, describe_processes
from tfdist.utils.argument_checks import MAX_SEED, UsageError, seconds, whole_number

_MIN_TOKEN_CHARACTERS = 16
_MAKE_TOKEN = 'python -c "import secrets; print(secrets.token_hex(16))"'
_ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):(?P<port>[0-9]{1,5})")
_MAX_TOKEN_BYTES = 4096

HELP = "start the workers of a script on this host and supervise them"
DESCRIPTION = """\
Start WORKERS processes of a script on this host, each with its TF_CONFIG, and supervise them.

Every output line of a worker is shown with its rank: "[0] ...". When a worker fails, its rank, its exit code or signal
and its last lines are reported, the other workers are ended (SIGTERM, after a grace period SIGKILL), and its exit code
becomes that of this command (128 + number for a signal). Ctrl-C ends all workers; a second Ctrl-C, at least a
second later, kills them immediately. No worker outlives this command.

With --max-restarts all workers are then restarted; a script with tfdist.callbacks.FailureRecovery resumes from its
newest checkpoint. SIGTERM and SIGUSR1 announce the end of the host: they are passed on, such a script saves and exits
with 75, and so does this command.

With --elastic MIN the other workers train on after a failure, and the worker that failed is restarted alone.

With --chief one more process, the chief, runs the script, and the N workers run TensorFlow's server for it: they hold
the stages of its model (ModelParallelStrategy). The run ends when the chief exits; if any process fails, the attempt
fails.

With --parameter-servers M a chief runs the script, too. The N workers and M parameter servers run TensorFlow's server
for it. If the chief or a parameter server fails, the attempt fails; a worker that exits or is frozen is restarted alone
while the training continues."""

EPILOG = """\
examples:
  tfdist run --workers 2 train.py --epochs 10
  tfdist run --workers 4 --max-restarts 3 --log-dir logs -m my_package.train --epochs 10
  tfdist run --chief --workers 4 train_in_stages.py
  tfdist run --workers 2 --parameter-servers 1 train.py
  tfdist run --plan plan.json train.py

All arguments after the script (or after -m MODULE) are passed to the script."""

_elastic_number = whole_number(at_least=1, example=2)


def _elastic_range(text: str) -> tuple[int, int | None]:
    least, colon, most = text.partition(":")
    numbers = _elastic_number(least), _elastic_number(most) if colon else None
    if numbers[1] is not None and numbers[1] < numbers[0]:
        raise argparse.ArgumentTypeError(
            f"MAX is less than MIN. Received: {text!r}. Expected: MIN:MAX, for example 2:4. Exchange them."
        )
    return numbers


class _ElasticRange(argparse.Action):
    """Stores MIN as `elastic` and MAX as `most_workers`."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        namespace.elastic, namespace.most_workers = values


start_timeout = seconds(may_be_zero=False, example=START_TIMEOUT_SECONDS)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the sub-command `run`."""
    parser.usage = "tfdist run (--workers N | --plan FILE) [options] (script.py | -m module) [arguments ...]"
    parser.add_argument(
        "--workers",
        type=whole_number(at_least=1, example=2),
        metavar="N",
        help="number of workers to start; required without --plan",
    )
    parser.add_argument(
        "--plan",
        type=Path,
        metavar="FILE",
        help="a file of tfdist plan --json: start the workers, parameter servers and chief of its best plan, with "
        "--workers of the best one for that number; tfdist.strategies.planned() in the script creates the strategy",
    )
    parser.add_argument(
        "--chief",
        action="store_true",
        help="start one more process, which runs the script; the N workers hold the stages of its model",
    )
    parser.add_argument(
        "--parameter-servers",
        type=whole_number(at_least=0, example=1),
        default=0,
        metavar="M",
        help="start a chief, which runs the script, and N workers and M parameter servers, which it uses "
        "(default: 0, N workers that all run the script). With --nodes M counts the parameter servers of all hosts, "
        "which are dealt to the hosts in turn",
    )
    parser.add_argument(
        "--worker-restarts",
        type=whole_number(at_least=0, example=3),
        metavar="K",
        help="with --elastic or parameter servers: restart each worker at most K times in an attempt; the training "
        "continues meanwhile, and --max-restarts does not count these restarts (default: no limit)",
    )
    parser.add_argument(
        "--elastic",
        action=_ElasticRange,
        type=_elastic_range,
        metavar="MIN[:MAX]",
        help="restart a worker that exits with an error, is killed or is frozen alone, while the others train on; the "
        "attempt fails when fewer than MIN workers train, of all hosts. For MultiWorkerMirroredStrategy, which is then "
        "elastic (default: a failure ends the attempt). With MAX the number of workers may grow up to it on one host: "
        "see --control-socket (default: N)",
    )
    parser.add_argument(
        "--control-socket",
        type=Path,
        metavar="PATH",
        help="with --elastic on one host: create this Unix socket, and listen there for tfdist resize PATH N, which "
        "changes the number of workers while they train (default: none)",
    )
    parser.add_argument(
        "--log-dir",
        type=Path,
        metavar="DIR",
        help="also write DIR/rank-<rank>.log; with a chief chief.log, worker-0.log, ps-0.log (default: none)",
    )
    parser.add_argument(
        "--start-timeout",
        type=start_timeout,
        metavar="S",
        help="seconds after which a worker fails if its peers have not started; above 0 (default: TFDIST_START_TIMEOUT "
        f"or {START_TIMEOUT_SECONDS:g})",
    )
    parser.add_argument(
        "--grace",
        type=seconds(example=5),
        metavar="S",
        help=f"seconds from SIGTERM to SIGKILL when workers are ended (default: {STOP_GRACE_SECONDS:g} after a signal "
        "to this command, which is time to save and less than the 30 s after which Slurm and Kubernetes kill this "
        f"command; {FAILURE_GRACE_SECONDS:g} after a failure). At most {RESTART_GRACE_SECONDS:g} after a failure that "
        "leads to a restart, because the state of the other workers is then useless",
    )
    parser.add_argument(
        "--max-restarts",
        type=whole_number(at_least=0, example=3),
        default=0,
        metavar="R",
        help="after a failure restart all workers, at most R times (default: 0)",
    )
    parser.add_argument(
        "--restart-delay",
        type=seconds(example=1),
        default=RunSpec.restart_delay,
        metavar="S",
        help="seconds from a failure to the restart after an attempt without progress; doubles after each further "
        f"one, up to {MAX_DELAY_SECONDS:g}. After an attempt with progress there is no delay (default: 1)",
    )
    parser.add_argument(
        "--warm-spares",
        action="store_true",
        help="keep processes that have already imported TensorFlow, one for each worker that may be restarted at the "
        "same time, so that a restart takes less time. "
        "It uses the memory of that import, and what the script sets in os.environ before the import has no effect",
    )
    parser.add_argument(
        "--min-workers",
        type=whole_number(at_least=1, example=1),
        metavar="K",
        help="restart with one worker less, but at least K, when the same rank failed in two attempts in a row or "
        "cannot be started; the next restart tries all workers again (default: N)",
    )
    parser.add_argument(
        "--heartbeat-timeout",
        type=seconds(example=10),
        default=RunSpec.heartbeat_timeout,
        metavar="S",
        help="seconds without a heartbeat, or stopped by a signal, after which a worker is frozen and is killed; 0: "
        "never, for debugging (default: 10)",
    )
    parser.add_argument(
        "--stall-timeout",
        type=seconds(example=600),
        default=RunSpec.stall_timeout,
        metavar="S",
        help="the training has failed if no worker makes a step for ten times the longest interval between two steps, "
        "and for at least S seconds; 0: never (default: 600)",
    )
    parser.add_argument(
        "--error-file",
        type=Path,
        metavar="PATH",
        help="write the cause of the last failed attempt, as JSON (default: attempt-<number>.json in --log-dir)",
    )
    parser.add_argument(
        "--network",
        choices=("auto", "private", "host"),
        default=RunSpec.network,
        help="private: a network namespace in which only the processes of this run reach each other; host: this host's "
        "network, for scripts that need the internet; auto: host, but with --chief or --parameter-servers, whose ports "
        "anybody may use, private if permitted, else host with a warning (default: auto)",
    )
    parser.add_argument(
        "--threads-per-worker",
        type=whole_number(at_least=1, example=2),
        metavar="T",
        help="threads of each worker (default: usable cores / workers, unless the environment sets them)",
    )
    parser.add_argument(
        "--seed",
        type=whole_number(at_least=0, at_most=MAX_SEED, example=1),
        metavar="S",
        help="where the random generators of Python, NumPy and TensorFlow start in every worker, and after every "
        "restart, unless the script seeds them (default: TFDIST_SEED; else a new seed for each run or batch job)",
    )
    parser.set_defaults(most_workers=None)
    _add_node_options(parser)
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, metavar="module", help="as python -m module")
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="script.py", help="the script and its arguments")


def apply_plan(options: argparse.Namespace) -> dict[str, str]:
    """Sets the options `workers`, `parameter_servers` and `chief` by the plan, if there is one.

    Returns variables for the environment of the processes. Raises a UsageError also without a plan and workers.
    """
    if options.plan is None:
        if options.workers is None:
            raise UsageError(
                "The number of workers is missing. Received: neither --workers nor --plan. Expected: tfdist run "
                "--workers N script.py. Add --workers, or --plan with a file of tfdist plan --json."
            )
        return {}
    _check_roles_are_not_given(options)
    try:
        file = PlanFile.read(options.plan)
    except ValueError as error:
        raise UsageError(str(error)) from error
    # Workers are counted by host in the command, and all together in the plan. Plans with servers are for one host.
    nodes = options.nodes
    plan = best_plan(
        file, workers=None if options.workers is None else nodes * options.workers, with_servers=nodes == 1
    )
    if plan is None:
        hosts = "" if nodes == 1 else f" --nodes {nodes}"
        workers_option = "" if options.workers is None else f" --workers {options.workers}"
        raise UsageError(
            f"The plan has nothing for this number of workers. Received: --plan {options.plan}{workers_option}{hosts}, "
            f"and plans for {describe_processes(file)}. Expected: a number of workers of one of them"
            f"{', all hosts together and without parameter servers' if hosts else ''}. Change --workers, or write a "
            "plan for this number: tfdist plan --workers N --json FILE script.py."
        )
    if plan.workers % nodes:
        raise UsageError(
            f"The workers of the best plan cannot be divided among the hosts. Received: --nodes {nodes} and "
            f"{Processes.of(plan)}. Expected: --workers N, the number on each host. Add --workers."
        )
    options.workers = plan.workers // nodes
    options.parameter_servers = plan.parameter_servers
    options.chief = Processes.of(plan).has_chief
    return {PLAN_VARIABLE: str(options.plan.resolve())}


def _check_roles_are_not_given(options: argparse.Namespace) -> None:
    role_options = [f"--parameter-servers {options.parameter_servers}"] * bool(options.parameter_servers)
    role_options += ["--chief"] * options.chief
    if role_options:
        raise UsageError(
            f"The plan chooses parameter servers and chief. Received: --plan {options.plan} {' '.join(role_options)}. "
            f"Expected: one of them. Remove {role_options[0].split()[0]} to train by the plan, or --plan and create "
            "the strategy by hand."
        )


def _add_node_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "several hosts",
        "Start the same command on every host, each with another --node-rank. --workers is the number on this host; "
        "--min-workers and --elastic count the workers of all hosts.",
    )
    group.add_argument(
        "--nodes", type=whole_number(at_least=1, example=2), default=1, metavar="H", help="number of hosts (default: 1)"
    )
    group.add_argument(
        "--node-rank", type=whole_number(at_least=0, example=0), metavar="I", help="number of this host, from 0"
    )
    group.add_argument(
        "--rendezvous",
        metavar="HOST:PORT",
        help="where the supervisors meet: the host of node 0 and a free port there",
    )
    group.add_argument(
        "--rejoin-timeout",
        type=seconds(example=60),
        metavar="S",
        help="seconds to wait for a lost host to join again, after which the run ends with exit code 69; 0 where "
        "nobody starts a lost supervisor again (default: that of --start-timeout)",
    )
    group.add_argument(
        "--address",
        metavar="A",
        help="address at which other hosts reach the workers of this one (default: the address from which it connects "
        "to the rendezvous)",
    )
    group.add_argument(
        "--token-file",
        type=Path,
        metavar="PATH",
        help=f"file with the secret that a host needs to join (default: the variable {TOKEN_VARIABLE})",
    )


def read_node_options(options: argparse.Namespace, environ: Mapping[str, str]) -> NodeOptions | None:
    """Returns the options of a run on several hosts after checks, or None for a run on one."""
    nodes, rank = options.nodes, options.node_rank
    if rank is not None and rank >= nodes:
        raise UsageError(
            f"--node-rank is too high. Received: --node-rank {rank} --nodes {nodes}. Expected: 0 to {nodes - 1}. "
            "Count the hosts from 0, or correct --nodes."
        )
    if nodes == 1:
        return None
    missing = [name for name, value in (("--node-rank", rank), ("--rendezvous", options.rendezvous)) if value is None]
    if missing:
        raise UsageError(
            f"Several hosts need a rendezvous. Received: --nodes {nodes} without {' and '.join(missing)}. Expected: "
            f"--nodes {nodes} --node-rank I --rendezvous HOST:PORT, the host of node 0 and a free port there."
        )
    match = _ADDRESS.fullmatch(options.rendezvous)
    if match is None or not 1 <= int(match["port"]) <= 65_535:
        raise UsageError(
            f"Invalid rendezvous. Received: --rendezvous {options.rendezvous}. Expected: HOST:PORT, for example "
            "node0:29400 or [fd00::1]:29400. Name the host of node 0 and a free port there."
        )
    if options.network == "private":
        raise UsageError(
            f"Workers in a private network cannot reach other hosts. Received: --nodes {nodes} --network private. "
            "Expected: --network host or none. Remove --network."
        )
    host = match["host"].strip("[]")
    return NodeOptions(rank, host, int(match["port"]), options.address, _token(options.token_file, environ))


def _token(path: Path | None, environ: Mapping[str, str]) -> str:
    if path is None:
        source, token = f"the variable {TOKEN_VARIABLE}", environ.get(TOKEN_VARIABLE, "").strip()
    else:
        source = f"--token-file {path}"
        try:
            with open(path, "rb") as file:
                token = file.read(_MAX_TOKEN_BYTES).decode().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(
                f"The token cannot be read. Received: {source} ({getattr(error, 'strerror', None) or error}). "
                f"Expected: a text file of at least {_MIN_TOKEN_CHARACTERS} characters. Create one by {_MAKE_TOKEN} > "
                f"{path}"
            ) from error
    if len(token) < _MIN_TOKEN_CHARACTERS:
        how = f"{len(token)} characters" if token else "nothing"
        raise UsageError(
            f"Several hosts need a secret token. Received: {how} in {source}. Expected: at "
            f"least {_MIN_TOKEN_CHARACTERS} characters, the same on every host. Create one by {_MAKE_TOKEN} and pass "
            f"it by --token-file or {TOKEN_VARIABLE}, never on the command line."
        )
    return token
