"""A run of the launcher whose results several tests check, also from several files and test processes."""

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from child_environment import child_environment

_SHOWN = 6000  # characters


@dataclass(frozen=True)
class LaunchedRun:
    """A finished `tfdist run`.

    Attributes:
      folder: contains what its processes have written, or those of a part of the run.
      output_folder: contains the output of all of them in `output.txt`; by default the same.
    """

    folder: Path
    output_folder: Path | None = None

    @property
    def output(self) -> str:
        """What the launcher and all processes have printed."""
        return self._read("output.txt")

    def _read(self, name: str) -> str:
        return ((self.output_folder or self.folder) / name).read_text()

    def path(self, name: str) -> Path:
        """Returns the path of a file in the folder; without the file, the test fails and shows the output."""
        path = self.folder / name
        if not path.exists():
            code = self._read("exit_code")
            raise AssertionError(f"The run has not written {name}. Exit code {code}:\n{self.output[-_SHOWN:]}")
        return path

    def json(self, name: str) -> Any:
        """Returns the content of a JSON file."""
        return json.loads(self.path(name).read_text())

    def arrays(self, name: str) -> dict[str, np.ndarray]:
        """Returns the arrays of an npz file."""
        return dict(np.load(self.path(name)))

    def assert_complete(self) -> "LaunchedRun":
        """Fails with the output unless the exit code was 0. Tests of a case need its file only."""
        code = self._read("exit_code")
        assert code == "0", f"Exit code {code}:\n{self.output[-_SHOWN:]}"
        return self


def launch(
    folder: Path,
    script: Path,
    *arguments: str,
    options: Sequence[str] = (),
    paths: Sequence[Path] = (),
    limit_seconds: float = 1200.0,
) -> LaunchedRun:
    """Runs `tfdist run OPTIONS script folder ARGUMENTS` and waits for its end, whatever its exit code is.

    Args:
      folder: an existing directory for what the processes write.
      script: the program of the workers, or of the chief.
      *arguments: its arguments after the folder.
      options: options of `tfdist run`.
      paths: directories to import from, besides the root and that of the script.
      limit_seconds: from which on the run is killed, and the test fails.
    """
    environment = child_environment(*paths, TMPDIR=str(folder))
    command = [sys.executable, "-m", "tfdist.launch", "run", *options, str(script), str(folder), *arguments]
    exit_code = "none: the run was killed"
    try:
        with (folder / "output.txt").open("w") as output:
            ended = subprocess.run(
                command, env=environment, stdout=output, stderr=output, timeout=limit_seconds, check=False
            )
        exit_code = str(ended.returncode)
    finally:  # tests of other processes show it, too
        (folder / "exit_code").write_text(exit_code)
    return LaunchedRun(folder)


def launch_once(tmp_path_factory: Any, name: str, script: Path, *arguments: str, **more: Any) -> LaunchedRun:
    """Runs `launch` once for all test processes of a session: the others wait, and use the results.

    Args:
      tmp_path_factory: the fixture.
      name: name of the run, unique in the test session.
      script: as in `launch`.
      *arguments: as in `launch`.
      **more: further arguments of `launch`.
    """
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # each test process has its own directory below that of the session
    folder = base / f"run of {name}".replace(" ", "-")
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            folder.mkdir()
            launch(folder, script, *arguments, **more)
    return LaunchedRun(folder)
