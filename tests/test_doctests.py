"""Every example in a docstring of tfdist runs and prints what it shows."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from child_environment import run_python

ROOT = Path(__file__).resolve().parents[1]
LIMIT_SECONDS = 1200
WITH_EXAMPLES = ("tfdist", "tfdist.versions")
SAMPLES = {
    "wrong": '"""\n>>> 1 + 1\n3\n"""\n',
    "broken": "import no_such_module\n",
    "right": '"""\n>>> import tensorflow as tf\n>>> len(tf.config.list_logical_devices("CPU"))\n2\n"""',
}


def modules() -> list[str]:
    """Every module of tfdist, also behind the links. Found as files, because importing them would start TensorFlow."""
    names = []
    for directory, _, files in os.walk(ROOT / "tfdist", followlinks=True):
        package = ".".join(Path(directory).relative_to(ROOT).parts)
        for file in files:
            # Not __main__: importing it runs the program.
            if file.endswith(".py") and file != "__main__.py":
                names.append(package if file == "__init__.py" else f"{package}.{file.removesuffix('.py')}")
    return sorted(names)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The outcome of every module and of `SAMPLES`, from one process."""
    samples = tmp_path_factory.mktemp("samples")
    for name, source in SAMPLES.items():
        (samples / f"{name}.py").write_text(source)
    program = [ROOT / "tests" / "run_doctests.py", *modules(), *SAMPLES]
    done = run_python(*program, paths=(samples,), limit_seconds=LIMIT_SECONDS)
    return json.loads(done.stdout.splitlines()[-1])


def test_examples_of_modules(outcomes: dict[str, dict[str, Any]]) -> None:
    reports = [outcomes[name]["report"] for name in modules() if outcomes[name]["failed"]]
    assert not reports, "\n".join(reports)


def test_examples_are_found(outcomes: dict[str, dict[str, Any]]) -> None:
    assert all(outcomes[name]["attempted"] for name in WITH_EXAMPLES)


def test_a_wrong_example_and_a_broken_module_fail(outcomes: dict[str, dict[str, Any]]) -> None:
    assert {name: outcomes[name]["failed"] for name in SAMPLES} == {"wrong": 1, "broken": 1, "right": 0}
    assert "Expected:\n    3" in outcomes["wrong"]["report"] and "no_such_module" in outcomes["broken"]["report"]
