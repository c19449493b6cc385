"""The options of `tfdist run`."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tfdist.launch.limits import FAILURE_GRACE_SECONDS, RESTART_GRACE_SECONDS, STOP_GRACE_SECONDS
from tfdist.launch.nodes.options import add_node_options
from tfdist.launch.restarts import MAX_DELAY_SECONDS

_DESCRIPTION = """\
Start WORKERS processes of a script on this host, each with its TF_CONFIG, and watch them.

Every line of a worker is shown behind its rank: "[0] ...". When a worker fails, its rank, its exit code or signal and
its last lines are reported, the others are ended (SIGTERM, after the grace SIGKILL), and its exit code becomes that
of this command (128 + number for a signal). Ctrl-C ends all workers, a second Ctrl-C kills them at once. No worker
outlives this command.

With --max-restarts all workers are then started again; a script with tfdist.callbacks.FailureRecovery goes on from its
newest checkpoint. SIGTERM and SIGUSR1 announce the end of the host: they are passed on, such a script saves and ends
with 75, and so does this command.

With --parameter-servers M one more process, the chief, runs the script, and the N workers and M parameter servers run
TensorFlow's server for it. When the chief has ended, all are ended. A parameter server that ends is a failure, as the
chief's is; a worker that ends or is frozen is started again alone, and the training goes on meanwhile."""

_EPILOG = """\
examples:
  tfdist run --workers 2 train.py --epochs 10
  tfdist run --workers 4 --max-restarts 3 --log-dir logs -m my_package.train --epochs 10
  tfdist run --workers 2 --network host download_and_train.py
  tfdist run --workers 2 --parameter-servers 1 train.py

Everything after the script (or after -m MODULE) is the script's own."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the sub-command `run`."""
    at_least_one = _number(int, at_least=1, expected="a whole number of at least 1, for example 2")
    count = _number(int, at_least=0, expected="a whole number of at least 0, for example 3")
    seconds = _number(float, at_least=0, expected="seconds, a number of at least 0, for example 5")
    parser.add_argument("--workers", type=at_least_one, required=True, metavar="N", help="number of workers to start")
    parser.add_argument(
        "--parameter-servers",
        type=count,
        default=0,
        metavar="M",
        help="start a chief, which runs the script, and N workers and M parameter servers, which it uses "
        "(default: 0, N workers that all run the script)",
    )
    parser.add_argument(
        "--worker-restarts",
        type=count,
        metavar="K",
        help="with parameter servers: start each worker again at most K times in an attempt; the training goes on "
        "meanwhile, and --max-restarts does not count it (default: always)",
    )
    parser.add_argument(
        "--log-dir",
        type=Path,
        metavar="DIR",
        help="also write DIR/rank-<rank>.log; with parameter servers chief.log, worker-0.log, ps-0.log (default: none)",
    )
    parser.add_argument(
        "--start-timeout",
        type=seconds,
        metavar="S",
        help="seconds after which a worker whose peers never came up ends with an error (default: 300)",
    )
    parser.add_argument(
        "--grace",
        type=seconds,
        metavar="S",
        help=f"seconds between SIGTERM and SIGKILL when workers are ended (default: {STOP_GRACE_SECONDS:g} after a "
        "signal to this command, which is time to save and less than the 30 s after which Slurm and Kubernetes kill "
        f"this command; {FAILURE_GRACE_SECONDS:g} after a failure). After a failure that leads to a restart at most "
        f"{RESTART_GRACE_SECONDS:g}: what is left of such workers is of no use",
    )
    parser.add_argument(
        "--max-restarts",
        type=count,
        default=0,
        metavar="R",
        help="after a failure start all workers again, at most R times (default: 0)",
    )
    parser.add_argument(
        "--restart-delay",
        type=seconds,
        default=1.0,
        metavar="S",
        help="seconds from a failure to the next start after an attempt that made no progress, doubled after each "
        f"further one, up to {MAX_DELAY_SECONDS:g}; after one with progress there is no delay (default: 1)",
    )
    parser.add_argument(
        "--warm-spares",
        action="store_true",
        help="keep a process for each worker that has imported TensorFlow already, so that a restart takes less time; "
        "it costs the memory of that import, and what the script sets in os.environ for it comes too late",
    )
    parser.add_argument(
        "--min-workers",
        type=at_least_one,
        metavar="K",
        help="go on with one worker less, but at least K, when the same rank failed in two attempts in a row or "
        "cannot be started; the next restart tries all again (default: N)",
    )
    parser.add_argument(
        "--heartbeat-timeout",
        type=seconds,
        default=10.0,
        metavar="S",
        help="seconds of silence, or of being stopped, after which a worker is frozen and is killed; 0: never, for "
        "debugging (default: 10)",
    )
    parser.add_argument(
        "--stall-timeout",
        type=seconds,
        default=600.0,
        metavar="S",
        help="a training in which no worker makes a step for ten times the longest interval between two steps, and "
        "at least S seconds, has failed; 0: never (default: 600)",
    )
    parser.add_argument(
        "--error-file",
        type=Path,
        metavar="PATH",
        help="write why the last failed attempt failed, as JSON (default: attempt-<number>.json in --log-dir)",
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
    add_node_options(parser, at_least_one=at_least_one, count=count)
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, metavar="module", help="as python -m module")
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="script.py", help="the script and its arguments")


def add_run_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    """Adds the sub-command `run` and returns its parser."""
    parser = commands.add_parser(
        "run",
        help="start the workers of a script on this host and watch them",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="tfdist run --workers N [options] (script.py | -m module) [arguments ...]",
        allow_abbrev=False,
    )
    add_options(parser)
    return parser


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
