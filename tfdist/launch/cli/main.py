"""The command line of `tfdist`: one parser, and one module for each sub-command."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence

import tfdist
from tfdist.launch.cli import (
    checkpoints_command,
    doctor_command,
    plan_command,
    resize_command,
    run_command,
    run_options,
)
from tfdist.utils.argument_checks import UsageError

# By name: the module of the help and the options, and the function that executes them.
_COMMANDS = {
    "run": (run_options, run_command.execute),
    "resize": (resize_command, resize_command.execute),
    "plan": (plan_command, plan_command.execute),
    "checkpoints": (checkpoints_command, checkpoints_command.execute),
    "doctor": (doctor_command, doctor_command.execute),
}
_USAGE_EXIT_CODE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: The arguments without the program's name. Defaults to `sys.argv[1:]`.

    Returns:
        The exit code: that of the sub-command; 2 if the command is invalid.

    >>> main(["--version"])
    tfdist 0.1.0
    0
    """
    _open_standard_streams()
    parser = _parser()
    try:
        options = parser.parse_args(argv)
        if "execute" not in options:
            parser.error(f"A command is missing. Expected: one of {', '.join(_COMMANDS)}. See tfdist --help.")
    except SystemExit as ending:  # argparse has printed its message
        return ending.code if isinstance(ending.code, int) else _USAGE_EXIT_CODE
    try:
        return int(options.execute(options))
    except UsageError as error:
        print(f"tfdist {options.command}: error: {error}", file=sys.stderr)
        return _USAGE_EXIT_CODE
    except KeyboardInterrupt:  # before the workers were started; later ones are passed on to them
        return 128 + signal.SIGINT


def _open_standard_streams() -> None:
    """Opens the streams that the parent process has closed. The next opened file would otherwise get their numbers."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            setattr(sys, name, os.fdopen(number, "w" if number else "r"))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tfdist",
        description="tf.distribute made right and fast under Keras 3.",
        epilog="example: tfdist run --workers 2 train.py --epochs 10",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"tfdist {tfdist.__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    for name in _COMMANDS:
        add_command(commands, name)
    return parser


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str) -> None:
    """Adds a sub-command."""
    module, execute = _COMMANDS[name]
    parser = commands.add_parser(
        name,
        help=module.HELP,
        description=module.DESCRIPTION,
        epilog=module.EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.add_options(parser)
    parser.set_defaults(execute=execute)
