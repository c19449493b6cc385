"""The options of `tfdist run`."""

import argparse
from pathlib import Path

from tfdist.launch.cli.node_options import add_node_options
from tfdist.launch.cli.planned_processes import add_plan_option
from tfdist.launch.restart.restart_policy import MAX_DELAY_SECONDS
from tfdist.launch.run_config import FAILURE_GRACE_SECONDS, RESTART_GRACE_SECONDS, STOP_GRACE_SECONDS
from tfdist.utils.argument_checks import MAX_SEED, seconds, whole_number

START_TIMEOUT_SECONDS = 300.0

_DESCRIPTION = """\
Start WORKERS processes of a script on this host, each with its TF_CONFIG, and supervise them.

Every output line of a worker is shown with its rank: "[0] ...". When a worker fails, its rank, its exit code or signal
and its last lines are reported, the other workers are ended (SIGTERM, after a grace period SIGKILL), and its exit code
becomes that of this command (128 + number for a signal). Ctrl-C ends all workers; a second Ctrl-C, at least a
second later, kills them immediately. No worker outlives this command.

With --max-restarts all workers are then restarted; a script with tfdist.callbacks.FailureRecovery resumes from its
newest checkpoint. SIGTERM and SIGUSR1 announce the end of the host: they are passed on, such a script saves and exits
with 75, and so does this command.

With --chief one more process, the chief, runs the script, and the N workers run TensorFlow's server for it: they hold
the stages of its model (ModelParallelStrategy). The run ends when the chief exits; if any process fails, the attempt
fails.

With --parameter-servers M a chief runs the script, too. The N workers and M parameter servers run TensorFlow's server
for it. If the chief or a parameter server fails, the attempt fails; a worker that exits or is frozen is restarted alone
while the training continues."""

_EPILOG = """\
examples:
  tfdist run --workers 2 train.py --epochs 10
  tfdist run --workers 4 --max-restarts 3 --log-dir logs -m my_package.train --epochs 10
  tfdist run --chief --workers 4 train_in_stages.py
  tfdist run --workers 2 --parameter-servers 1 train.py
  tfdist run --plan plan.json train.py

All arguments after the script (or after -m MODULE) are passed to the script."""

start_timeout = seconds(may_be_zero=False, example=START_TIMEOUT_SECONDS)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the sub-command `run`."""
    parser.add_argument(
        "--workers",
        type=whole_number(at_least=1, example=2),
        metavar="N",
        help="number of workers to start; required without --plan",
    )
    add_plan_option(parser)
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
        help="with parameter servers: restart each worker at most K times in an attempt; the training continues "
        "meanwhile, and --max-restarts does not count these restarts (default: no limit)",
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
        default=1.0,
        metavar="S",
        help="seconds from a failure to the restart after an attempt without progress; doubles after each further "
        f"one, up to {MAX_DELAY_SECONDS:g}. After an attempt with progress there is no delay (default: 1)",
    )
    parser.add_argument(
        "--warm-spares",
        action="store_true",
        help="keep a process for each worker that has already imported TensorFlow, so that a restart takes less time. "
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
        default=10.0,
        metavar="S",
        help="seconds without a heartbeat, or stopped by a signal, after which a worker is frozen and is killed; 0: "
        "never, for debugging (default: 10)",
    )
    parser.add_argument(
        "--stall-timeout",
        type=seconds(example=600),
        default=600.0,
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
        default="auto",
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
    add_node_options(parser)
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, metavar="module", help="as python -m module")
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="script.py", help="the script and its arguments")


def add_run_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    """Adds the sub-command `run` and returns its parser."""
    parser = commands.add_parser(
        "run",
        help="start the workers of a script on this host and supervise them",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="tfdist run (--workers N | --plan FILE) [options] (script.py | -m module) [arguments ...]",
        allow_abbrev=False,
    )
    add_options(parser)
    return parser
