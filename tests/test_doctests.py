"""Every example in a docstring of tfdist runs and says the truth."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
LIMIT_SECONDS = 300
WITH_EXAMPLES = ("tfdist", "tfdist.versions")


def modules() -> list[str]:
    """Every module of tfdist, also behind the links. Found as files: importing them here would start TensorFlow."""
    names = []
    for directory, _, files in os.walk(ROOT / "tfdist", followlinks=True):
        package = ".".join(Path(directory).relative_to(ROOT).parts)
        for file in files:
            # Not __main__: importing it runs the program.
            if file.endswith(".py") and file != "__main__.py":
                names.append(package if file == "__init__.py" else f"{package}.{file.removesuffix('.py')}")
    return sorted(names)


@cache
def outcomes(*names: str, root: Path = ROOT) -> dict[str, dict[str, Any]]:
    """Runs all modules in one process, once."""
    environment = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    environment["PYTHONPATH"] = str(root)
    program = [sys.executable, str(ROOT / "tests" / "run_doctests.py"), *names]
    done = subprocess.run(program, cwd=root, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", modules())
def test_examples_of(name: str) -> None:
    outcome = outcomes(*modules())[name]
    assert not outcome["failed"], outcome["report"]


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_are_found(name: str) -> None:
    assert outcomes(*modules())[name]["attempted"]


def test_a_wrong_example_and_a_broken_module_fail(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text('"""\n>>> 1 + 1\n3\n"""\n')
    (tmp_path / "broken.py").write_text("import no_such_module\n")
    (tmp_path / "right.py").write_text(
        '"""\n>>> import tensorflow as tf\n>>> len(tf.config.list_logical_devices("CPU"))\n2\n"""'
    )
    found = outcomes("wrong", "broken", "right", root=tmp_path)
    assert {name: outcome["failed"] for name, outcome in found.items()} == {"wrong": 1, "broken": 1, "right": 0}
    assert "Expected:\n    3" in found["wrong"]["report"] and "no_such_module" in found["broken"]["report"]
