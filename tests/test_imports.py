"""Every name that tests, examples and benchmarks import from tfdist exists: many are imported late."""

import ast
import importlib
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[1]
_FILES = sorted(
    path.relative_to(_ROOT).as_posix()
    for folder in ("benchmarks", "docs", "examples", "tests")
    for path in (_ROOT / folder).rglob("*.py")
)
pytestmark = pytest.mark.usefixtures("cpus")


def missing(source: str) -> list[str]:
    """The names that `source` imports from tfdist and that do not exist."""
    wanted = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            wanted += [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            wanted += [(node.module or "", alias.name) for alias in node.names]
    return [
        f"{module}:{name}" if name else module
        for module, name in wanted
        if module.split(".")[0] == "tfdist" and not exists(module, name)
    ]


def exists(module: str, name: str | None) -> bool:
    try:
        if name is None or hasattr(importlib.import_module(module), name):
            importlib.import_module(module)
            return True
        importlib.import_module(f"{module}.{name}")
    except ImportError:
        return False
    return True


def test_imports_exist() -> None:
    found = {path: missing((_ROOT / path).read_text(encoding="utf-8")) for path in _FILES}
    assert len(found) > 500 and not {path: names for path, names in found.items() if names}


def test_a_missing_name_is_found() -> None:
    source = "def f():\n    from tfdist.launch import gone\n    import tfdist.nowhere, tfdist.launch"
    assert missing(source) == ["tfdist.launch:gone", "tfdist.nowhere"]
