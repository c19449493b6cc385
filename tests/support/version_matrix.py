"""Runs a representative set of tests with the oldest and the newest supported TensorFlow and Keras: `make matrix`.

Each pair of versions gets an environment of its own in `build/matrix`, which later runs use again.
"""

import argparse
import os
import shutil
import subprocess
import sys
import venv
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from version_tests import GROUPS, group_of, selection

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "matrix"
# tensorflow-cpu: the same code as tensorflow, in a smaller download.
PAIRS = {
    "2.18-3.10": ("tensorflow-cpu==2.18.*", "keras==3.10.*"),
    "2.19-3.10": ("tensorflow-cpu==2.19.*", "keras==3.10.*"),
    "2.18-newest": ("tensorflow-cpu==2.18.*", "keras"),
    "2.21-3.12": ("tensorflow-cpu==2.21.*", "keras==3.12.*"),
    "newest": ("tensorflow-cpu", "keras"),
    "nightly": ("--pre", "tensorflow-cpu", "keras-nightly"),
}
OUTCOMES = ("passed", "failed", "skipped")
TOOLS = "cloudpickle psutil pytest>=8.3 pytest-timeout>=2.3 pytest-xdist>=3.6 setuptools>=70.1 tensorboard".split()


@dataclass(frozen=True)
class PairResult:
    """What one pair of versions gave: by group of tests, the number of tests by outcome, such as `{"passed": 3}`."""

    pair: str
    versions: dict[str, str]
    outcomes: dict[str, dict[str, int]]
    passed: bool

    def cell(self, group: str) -> str:
        """Returns the table's text on a group."""
        counts = self.outcomes.get(group, {})
        return ", ".join(f"{counts[kind]} {kind}" for kind in OUTCOMES if kind in counts) or "not run"


def create_environment(pair: str) -> Path:
    """Returns the Python of the pair's environment, which is created if it is missing or unfinished."""
    folder = FOLDER / f"{pair}-python{sys.version_info.major}.{sys.version_info.minor}"
    python, finished = folder / "bin" / "python", folder / "installed"
    if not finished.exists():
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder, with_pip=True)
        lines = (ROOT / "tfdist" / "requirements.txt").read_text(encoding="utf-8").splitlines()
        # Without Keras, which the pair names: pip would write `keras` over `keras-nightly`.
        others = [line for line in lines if line and not line.startswith(("#", "keras"))]
        # Python compiles what it imports, a small part of these packages.
        install = [python, "-m", "pip", "install", "--quiet", "--no-compile"]
        subprocess.run([*install, *PAIRS[pair], *others, *TOOLS], check=True)
        finished.touch()
    return python


def versions_of(python: Path) -> dict[str, str]:
    """Returns the versions of TensorFlow, Keras and Python of an environment."""
    program = "import platform, tensorflow, keras; print(tensorflow.__version__, keras.__version__, end=' ')"
    program += "; print(platform.python_version())"
    printed = subprocess.run([python, "-c", program], env=_environment(), capture_output=True, text=True, check=True)
    return dict(zip(("TensorFlow", "Keras", "Python"), printed.stdout.split()[-3:], strict=True))


def run_pair(pair: str, processes: int, groups: Sequence[str] = ()) -> PairResult:
    """Runs groups of tests, by default all, with a pair of versions, and shows pytest's output."""
    python = create_environment(pair)
    versions = versions_of(python)
    print(f"{pair}: {versions}", flush=True)
    report = FOLDER / f"{pair}.xml"
    report.unlink(missing_ok=True)
    command = [python, "-m", "pytest", "-v", "-p", "no:cacheprovider", f"--junitxml={report}", "--durations=15"]
    command += ["-n", str(processes), "--dist", "loadfile", "-m", "not long or version_matrix"]
    ended = subprocess.run([*command, *selection(versions["Keras"], groups)], cwd=ROOT, env=_environment(), check=False)
    outcomes = outcomes_in(report) if report.exists() else {}
    return PairResult(pair, versions, outcomes, ended.returncode == 0)


def outcomes_in(report: Path) -> dict[str, dict[str, int]]:
    """Returns the number of tests by group and outcome, from a report of pytest in the format of JUnit."""
    outcomes: dict[str, dict[str, int]] = {}
    for test in ElementTree.parse(report).iter("testcase"):
        group = outcomes.setdefault(group_of(test.attrib["classname"], test.attrib["name"]), {})
        kinds = {child.tag for child in test} & {"failure", "error", "skipped"}
        outcome = "skipped" if kinds == {"skipped"} else "failed" if kinds else "passed"
        group[outcome] = group.get(outcome, 0) + 1
    return outcomes


def table(results: list[PairResult]) -> str:
    """Returns the results as a table.

    >>> versions = {"TensorFlow": "2.21.0", "Keras": "3.15.1", "Python": "3.11.7"}
    >>> outcomes = {"canaries": {"passed": 9}, "recovery": {"passed": 2, "failed": 1}}
    >>> result = PairResult("newest", versions, outcomes, passed=False)
    >>> print(table([result]).splitlines()[-1])
    | `newest` | 2.21.0 | 3.15.1 | 3.11.7 | 9 passed | not run | not run | 2 passed, 1 failed | not run | not run |
    """
    head = ["pair", "TensorFlow", "Keras", "Python", *GROUPS]
    rows = [[f"`{each.pair}`", *each.versions.values(), *map(each.cell, GROUPS)] for each in results]
    lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TF_CONFIG")}
    settings = {"TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONNOUSERSITE": "1", "TEST_GRAPPLER": "twice"}
    return {**kept, "KERAS_BACKEND": "tensorflow", **settings}


def main() -> None:
    """Runs the pairs that are named, or all; exits with 1 if a test failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pairs", nargs="*", metavar="pair", help=f"one of {', '.join(PAIRS)}; by default all")
    parser.add_argument("--processes", type=int, default=2, help="how many processes run tests (2)")
    parser.add_argument("--group", action="append", choices=list(GROUPS), default=[], help="run only these tests")
    parser.add_argument("--install-only", action="store_true", help="create the environments, run no tests")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.pairs) - set(PAIRS))
    if unknown:
        parser.error(f"Unknown pairs. Received: {', '.join(unknown)}. Expected: some of {', '.join(PAIRS)}.")
    pairs = arguments.pairs or list(PAIRS)
    if arguments.install_only:
        for pair in pairs:
            print(f"{pair}: {versions_of(create_environment(pair))}", flush=True)
        return
    results = [run_pair(pair, arguments.processes, arguments.group) for pair in pairs]
    print(table(results))
    sys.exit(not all(result.passed for result in results))


if __name__ == "__main__":
    main()
