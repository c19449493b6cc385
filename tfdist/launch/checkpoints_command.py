"""`tfdist checkpoints`: lists, verifies and prunes the checkpoints of a directory."""

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfdist.launch.errors import UsageError

if TYPE_CHECKING:
    from tfdist.checkpoint import Entry

_DESCRIPTION = """\
List the checkpoints in DIR: what they are, and whether they are whole.

Without --verify a checkpoint counts as whole when its manifest is, and its files are there in their sizes. A training
that starts again looks at every byte."""

_EPILOG = """\
examples:
  tfdist checkpoints checkpoints
  tfdist checkpoints checkpoints --verify
  tfdist checkpoints checkpoints --prune 2 --dry-run

Exit code: 0; 1 if --verify found a broken one, or something cannot be read or removed; 2 if the command is wrong."""

_FAILURE_EXIT_CODE = 1
_HEADINGS = ("sequence", "step", "epoch", "workers", "size", "age", "status")


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the sub-command `checkpoints`."""
    parser = commands.add_parser(
        "checkpoints",
        help="list, verify and prune the checkpoints of a directory",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="the directory of FailureRecovery")
    parser.add_argument("--verify", action="store_true", help="read every byte; exit code 1 if one is broken")
    parser.add_argument(
        "--prune",
        type=_keep,
        metavar="KEEP",
        help="remove all but the newest KEEP whole checkpoints, and what is broken or unfinished; reads every byte of "
        "those that stay. Not while a training saves there",
    )
    parser.add_argument("--dry-run", action="store_true", help="with --prune: only say what would be removed")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(execute=execute)


def execute(options: argparse.Namespace) -> int:
    """Lists, verifies or prunes, and returns the exit code.

    Raises:
        UsageError: If the command is wrong. Nothing was read or removed then.
    """
    # Not at the top: NumPy starts threads, and `tfdist run` has to be single-threaded.
    from tfdist.checkpoint import CheckpointError, CheckpointStore

    if options.dry_run and options.prune is None:
        raise UsageError("--dry-run says what --prune would remove. Received: --dry-run alone. Expected: --prune KEEP.")
    if not options.directory.is_dir():
        raise UsageError(
            f"The directory does not exist. Received: {str(options.directory)!r}. Expected: the directory that "
            "FailureRecovery saves to."
        )
    store = CheckpointStore(options.directory)
    try:
        removed = [] if options.prune is None else store.prune(options.prune, dry_run=options.dry_run)
        entries = store.entries(every_byte=options.verify)
    except CheckpointError as error:
        print(f"tfdist checkpoints: {error}", file=sys.stderr)
        return _FAILURE_EXIT_CODE
    if options.json:
        print(json.dumps(_as_json(entries, removed, options), indent=1))
    else:
        _print_table(entries, removed, options)
    return _FAILURE_EXIT_CODE if options.verify and any(entry.status == "broken" for entry in entries) else 0


def _print_table(entries: list["Entry"], removed: list[Path], options: argparse.Namespace) -> None:
    for path in removed:
        print(f"{'would remove' if options.dry_run else 'removed'} {path.name}")
    if not entries:
        print(f"{options.directory}: no checkpoints")
        return
    rows = [_HEADINGS, *(_row(entry) for entry in entries)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for *cells, status in rows:
        print("  ".join([*(cell.rjust(width) for cell, width in zip(cells, widths[:-1], strict=True)), status]))
    counts = Counter(entry.status for entry in entries)
    total = ", ".join(f"{count} {status}" for status, count in counts.items())
    looked_at = "every byte was read" if options.verify else "sizes and manifests were looked at, --verify reads all"
    print(f"{options.directory}: {total}; {looked_at}")


def _row(entry: "Entry") -> tuple[str, ...]:
    facts = entry.facts or {}
    return (
        str(entry.sequence),
        *("-" if value is None else str(value) for value in (facts.get("step"), facts.get("epoch"), entry.world)),
        format_bytes(entry.size_bytes),
        "-" if entry.saved_at is None else format_age(time.time() - entry.saved_at),
        f"{entry.status}: {entry.reason}" if entry.reason else entry.status,
    )


def _as_json(entries: list["Entry"], removed: list[Path], options: argparse.Namespace) -> dict[str, Any]:
    return {
        "directory": str(options.directory),
        "every_byte_read": options.verify,
        "would_remove" if options.dry_run else "removed": [path.name for path in removed],
        "checkpoints": [
            {
                "sequence": entry.sequence,
                "step": (entry.facts or {}).get("step"),
                "epoch": (entry.facts or {}).get("epoch"),
                "workers": entry.world,
                "size_bytes": entry.size_bytes,
                "saved_at": entry.saved_at,
                "status": entry.status,
                "reason": entry.reason,
                "name": entry.path.name,
            }
            for entry in entries
        ],
    }


def format_bytes(count: int) -> str:
    """Returns a number of bytes for people.

    >>> format_bytes(999), format_bytes(50_123_456)
    ('999 B', '50.1 MB')
    """
    size, unit = float(count), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 999.95 or unit == "TB":
            break
        size /= 1000
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"


def format_age(seconds: float) -> str:
    """Returns a duration for people, in its largest whole unit.

    >>> format_age(7.5), format_age(7200), format_age(200_000)
    ('7 s', '2 h', '2 d')
    """
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{max(0, int(seconds))} s"


def _keep(text: str) -> int:
    try:
        keep = int(text)
    except ValueError:
        keep = 0
    if keep < 1:
        raise argparse.ArgumentTypeError(
            f"The number is wrong. Received: {text!r}. Expected: a whole number of at least 1, for example 2."
        )
    return keep
