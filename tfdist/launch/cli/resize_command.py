"""`tfdist resize`: changes the number of workers of an elastic run while they train."""

import argparse
import json
import socket
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfdist.launch.processes.control_socket import MAX_BYTES
from tfdist.utils.argument_checks import UsageError, whole_number
from tfdist.utils.json_messages import json_object

_ANSWER_SECONDS = 30.0

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


def request(path: Path, message: Mapping[str, Any]) -> str:
    """Sends a request to a run, and returns its answer.

    Raises:
        UsageError: No run listens there, or it refuses the request, or does not answer in 30 s; then it does not carry
            the request out later.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            # `settimeout` would not wait while many others wait to be accepted.
            seconds, fraction = divmod(_ANSWER_SECONDS, 1.0)
            limit = struct.pack("ll", int(seconds), int(1e6 * fraction))
            for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                connection.setsockopt(socket.SOL_SOCKET, option, limit)
            connection.connect(str(path))
            connection.send(json.dumps(message).encode())
            received = connection.recv(MAX_BYTES)
            if not received:
                raise BlockingIOError
            answer = json_object(received)
    except BlockingIOError as error:
        raise UsageError(
            f"The run does not answer. Received: {path}. Expected: an answer within {_ANSWER_SECONDS:g} s. The run is "
            "between two attempts, or the launcher is stopped. Ask again; this request is not carried out."
        ) from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"No run answers. Received: {path} ({reason}). Expected: the path that a run has got by --control-socket, "
            "on the same host, while it trains. Correct the path."
        ) from error
    if "error" in answer:
        raise UsageError(str(answer["error"]))
    return str(answer.get("text"))
