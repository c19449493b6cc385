"""`tfdist resize`: changes the number of workers of an elastic run while they train."""

import argparse
from pathlib import Path

from tfdist.launch.processes.control_socket import request
from tfdist.utils.argument_checks import whole_number

HELP = "change the number of workers of an elastic run while they train"
DESCRIPTION = """\
Ask the run that listens at PATH (tfdist run --elastic MIN:MAX --control-socket PATH) to train with N workers.

Workers that are started join the others. Workers that leave get SIGTERM, finish their step, and are not restarted."""

EPILOG = """\
example:
  tfdist run --workers 2 --elastic 1:4 --control-socket run.sock train.py
  tfdist resize run.sock 3

Exit code: 0; 2 if no run answers, or N is not from MIN to MAX."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the sub-command `resize`."""
    parser.add_argument("socket", type=Path, metavar="PATH", help="the --control-socket of the run")
    parser.add_argument(
        "workers", type=whole_number(at_least=1, example=3), metavar="N", help="the number of workers, from MIN to MAX"
    )


def execute(options: argparse.Namespace) -> int:
    """Sends the request, and prints the answer."""
    print(request(options.socket, {"workers": options.workers}))
    return 0
