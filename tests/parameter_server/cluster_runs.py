"""Runs the script of a chief with workers and parameter servers under `tfdist run`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launched_runs import LaunchedRun, launch, launch_once

_HERE = Path(__file__).resolve().parent


def launch_chief(folder: Path, script: str, *arguments: str, **cluster: Any) -> LaunchedRun:
    """Runs `script folder arguments...` as the chief of a cluster; see `_options` for the cluster."""
    return launch(folder, _HERE / script, *arguments, **_options(**cluster))


def launch_chief_once(tmp_path_factory: Any, script: str, *arguments: str, **cluster: Any) -> LaunchedRun:
    """Runs `launch_chief` once for all test processes of a session."""
    return launch_once(tmp_path_factory, script, _HERE / script, *arguments, **_options(**cluster))


def _options(*, workers: int = 2, servers: int = 1, options: Sequence[str] = ()) -> dict[str, Any]:
    return {
        "options": ["--workers", str(workers), "--parameter-servers", str(servers), *options],
        "paths": [_HERE.parent / "parity", _HERE.parent / "strategies"],
        "limit_seconds": 2400,
    }
