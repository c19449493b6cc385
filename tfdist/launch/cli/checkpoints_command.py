"""`tfdist checkpoints`: lists, verifies and prunes the checkpoints of a directory or an object store."""

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfdist.utils.argument_checks import UsageError, whole_number
from tfdist.utils.formatting import align_columns, format_bytes, format_duration

if TYPE_CHECKING:
    from tfdist.checkpoint import CheckpointInfo

HELP = "list, verify and prune the checkpoints of a directory or an object store"
DESCRIPTION = """\
List the checkpoints in DIR, a path or an address such as s3://bucket/run: their steps, sizes and status.

Without --verify a checkpoint counts as complete if its manifest is valid and its files have the recorded sizes. A
training that resumes verifies all checksums. For an address, --verify and --prune read the files of checkpoints."""

EPILOG = """\
examples:
  tfdist checkpoints checkpoints
  tfdist checkpoints checkpoints --verify
  tfdist checkpoints checkpoints --prune 2 --dry-run
  tfdist checkpoints s3://bucket/run --verify

Exit code: 0; 1 if --verify found a corrupt checkpoint, or a file cannot be read or removed; 2 for a usage error."""

_FAILURE_EXIT_CODE = 1
_HEADINGS = ("sequence", "step", "epoch", "workers", "size", "age", "status")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the sub-command `checkpoints`."""
    parser.add_argument("directory", metavar="DIR", help="the directory of FailureRecovery, or its address")
    parser.add_argument(
        "--verify", action="store_true", help="verify all checksums; exit code 1 if a checkpoint is corrupt"
    )
    parser.add_argument(
        "--prune",
        type=whole_number(at_least=1, example=2),
        metavar="KEEP",
        help="remove all but the newest KEEP complete checkpoints, and corrupt and unfinished ones; verifies the "
        "checksums of those that stay. Not while a training saves there, which an object store refuses",
    )
    parser.add_argument("--dry-run", action="store_true", help="with --prune: only say what would be removed")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def execute(options: argparse.Namespace) -> int:
    """Lists, verifies or prunes, and returns the exit code. After a UsageError nothing was read or removed."""
    # Imported late: NumPy starts threads, and `tfdist run` has to be single-threaded.
    from tfdist.checkpoint import CheckpointError, open_store

    if options.dry_run and options.prune is None:
        raise UsageError("--dry-run says what --prune would remove. Received: --dry-run alone. Expected: --prune KEEP.")
    try:
        store = open_store(options.directory)
    except (ImportError, ValueError) as error:
        raise UsageError(str(error)) from error
    if store.directory is not None and not store.directory.is_dir():
        raise UsageError(
            f"The directory does not exist. Received: {options.directory!r}. Expected: the directory that "
            "FailureRecovery saves to."
        )
    try:
        removed = [] if options.prune is None else store.prune(options.prune, dry_run=options.dry_run)
        entries = store.list_checkpoints(verify_checksums=options.verify)
    except CheckpointError as error:
        print(f"tfdist checkpoints: {error}", file=sys.stderr)
        return _FAILURE_EXIT_CODE
    if options.json:
        print(json.dumps(_as_json(entries, removed, options), indent=1))
    else:
        _print_table(entries, removed, options)
    return _FAILURE_EXIT_CODE if options.verify and any(entry.status == "corrupt" for entry in entries) else 0


def _print_table(entries: list["CheckpointInfo"], removed: list[Path], options: argparse.Namespace) -> None:
    for path in removed:
        print(f"{'would remove' if options.dry_run else 'removed'} {path.name}")
    if not entries:
        print(f"{options.directory}: no checkpoints")
        return
    rows = [_HEADINGS, *(_row(entry) for entry in entries)]
    for line in align_columns(rows, left=[len(_HEADINGS) - 1]):
        print(line)
    counts = Counter(entry.status for entry in entries)
    total = ", ".join(f"{count} {status}" for status, count in counts.items())
    looked_at = (
        "all checksums were verified"
        if options.verify
        else "sizes and manifests were checked, --verify computes all checksums"
    )
    print(f"{options.directory}: {total}; {looked_at}")


def _row(entry: "CheckpointInfo") -> tuple[str, ...]:
    metadata = entry.metadata or {}
    return (
        str(entry.sequence),
        *(
            "-" if value is None else str(value)
            for value in (metadata.get("step"), metadata.get("epoch"), entry.num_ranks)
        ),
        format_bytes(entry.size_bytes),
        "-" if entry.saved_at is None else format_duration(time.time() - entry.saved_at),
        f"{entry.status}: {entry.reason}" if entry.reason else entry.status,
    )


def _as_json(entries: list["CheckpointInfo"], removed: list[Path], options: argparse.Namespace) -> dict[str, Any]:
    return {
        "directory": options.directory,
        "checksums_verified": options.verify,
        "would_remove" if options.dry_run else "removed": [path.name for path in removed],
        "checkpoints": [
            {
                "sequence": entry.sequence,
                "step": (entry.metadata or {}).get("step"),
                "epoch": (entry.metadata or {}).get("epoch"),
                "workers": entry.num_ranks,
                "size_bytes": entry.size_bytes,
                "saved_at": entry.saved_at,
                "status": entry.status,
                "reason": entry.reason,
                "name": entry.path.name,
            }
            for entry in entries
        ],
    }
