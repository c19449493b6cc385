"""Runs a representative set of tests with the oldest and the newest supported TensorFlow and Keras: `make matrix`.

Each pair of versions gets an environment of its own in `build/matrix`, which later runs use again.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
import venv
from dataclasses import dataclass
from pathlib import Path

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
TOOLS = "cloudpickle psutil pytest>=8.3 pytest-timeout>=2.3 pytest-xdist>=3.6 setuptools>=70.1 tensorboard".split()
TESTS = (
    "tests/parameter_server/test_cluster_training.py",
    "tests/strategies/test_multi_worker_strategy.py",
    "tests/strategies/test_mirrored_strategy.py",
    "tests/strategies/test_version_canaries.py",
    "tests/callbacks/test_failure_recovery.py",
    "tests/callbacks/test_gradient_accumulation.py",
    "tests/recovery/test_callback_state.py",
    "tests/compression/test_exchange.py",
)
# Tests of what older versions of Keras cannot do without a strategy either, and in which version Keras can.
ABSENT_BEFORE = {
    # train_on_batch passes bfloat16 logs to NumPy, which cannot read them.
    "tests/strategies/test_mirrored_strategy.py::test_a_log_of_another_dtype_than_its_metric_is_the_mean": (3, 14),
}


@dataclass(frozen=True)
class PairResult:
    """What one pair of versions gave; `summary` is the last line of pytest."""

    pair: str
    versions: dict[str, str]
    summary: str
    passed: bool
    seconds: float


def create_environment(pair: str) -> Path:
    """Returns the Python of the pair's environment, which is created if it is missing or unfinished."""
    folder = FOLDER / pair
    python, finished = folder / "bin" / "python", folder / "installed"
    if not finished.exists():
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder, with_pip=True)
        lines = (ROOT / "tfdist" / "requirements.txt").read_text(encoding="utf-8").splitlines()
        # Without Keras, which the pair names: pip would write `keras` over `keras-nightly`.
        others = [line for line in lines if line and not line.startswith(("#", "keras"))]
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PAIRS[pair], *others, *TOOLS], check=True)
        finished.touch()
    return python


def versions_of(python: Path) -> dict[str, str]:
    """Returns the versions of TensorFlow and Keras that an environment imports."""
    program = "import tensorflow, keras; print(tensorflow.__version__, keras.__version__)"
    printed = subprocess.run([python, "-c", program], env=_environment(), capture_output=True, text=True, check=True)
    return dict(zip(("tensorflow", "keras"), printed.stdout.split()[-2:], strict=True))


def selection(keras_version: str) -> list[str]:
    """Returns pytest's arguments that select the tests for a version of Keras.

    >>> selection("3.15.1") == list(TESTS), len(selection("3.10.0")) - len(TESTS)
    (True, 2)
    """
    have = tuple(int(part) for part in keras_version.split(".")[:2])
    absent = [["--deselect", test] for test, since in ABSENT_BEFORE.items() if have < since]
    return [*TESTS, *(argument for arguments in absent for argument in arguments)]


def run_pair(pair: str, processes: int) -> PairResult:
    """Runs the set with a pair of versions, and shows pytest's output."""
    python = create_environment(pair)
    versions = versions_of(python)
    print(f"{pair}: {versions}", flush=True)
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", str(processes), "--dist", "loadfile"]
    began = time.monotonic()
    running = subprocess.Popen(
        [*command, *selection(versions["keras"])], cwd=ROOT, env=_environment(), stdout=subprocess.PIPE, text=True
    )
    assert running.stdout is not None
    summary = ""
    for line in running.stdout:
        sys.stdout.write(line)
        sys.stdout.flush()
        summary = line.strip(" =\n") or summary
    return PairResult(pair, versions, summary, running.wait() == 0, time.monotonic() - began)


def table(results: list[PairResult]) -> str:
    """Returns the results as a table.

    >>> print(table([PairResult("newest", {"tensorflow": "2.21.0", "keras": "3.15.1"}, "9 passed", True, 61.0)]))
    | pair | TensorFlow | Keras | result |
    |---|---|---|---|
    | `newest` | 2.21.0 | 3.15.1 | 9 passed |
    """
    rows = [
        f"| `{each.pair}` | {each.versions['tensorflow']} | {each.versions['keras']} | {each.summary} |"
        for each in results
    ]
    return "\n".join(["| pair | TensorFlow | Keras | result |", "|---|---|---|---|", *rows])


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TF_CONFIG")}
    return {**kept, "KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONNOUSERSITE": "1"}


def main() -> None:
    """Runs the pairs that are named, or all; exits with 1 if a test failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pairs", nargs="*", metavar="pair", help=f"one of {', '.join(PAIRS)}; by default all")
    parser.add_argument("--processes", type=int, default=2, help="how many processes run tests (2)")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.pairs) - set(PAIRS))
    if unknown:
        parser.error(f"Unknown pairs. Received: {', '.join(unknown)}. Expected: some of {', '.join(PAIRS)}.")
    results = [run_pair(pair, arguments.processes) for pair in arguments.pairs or PAIRS]
    print(table(results))
    sys.exit(not all(result.passed for result in results))


if __name__ == "__main__":
    main()
