"""Python blocks in the documentation parse, and the names of tfdist in them exist and accept the arguments.

The test reads the blocks marked `python` of README.md and of every page. A block with a program of another library (it
imports Horovod, or `tf.keras` of Keras 2) is only parsed.
"""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
STRATEGY = ("MirroredStrategy", "MultiWorkerMirroredStrategy", "ParameterServerStrategy", "ModelParallelStrategy")

pytestmark = pytest.mark.usefixtures("cpus")


def blocks(text: str) -> list[tuple[int, str]]:
    """The blocks of a page, as (line, source)."""
    return [(text.count("\n", 0, match.start()) + 2, match[1]) for match in BLOCK.finditer(text)]


def imported(tree: ast.AST) -> dict[str, tuple[str, str | None]]:
    """The names that a block imports from tfdist, each with (module, name in it)."""
    found: dict[str, tuple[str, str | None]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "tfdist":
            found |= {alias.asname or alias.name: (node.module, alias.name) for alias in node.names}
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "tfdist":
                    found[alias.asname or "tfdist"] = (alias.name if alias.asname else "tfdist", None)
    return found


def resolve(node: ast.AST, names: dict[str, tuple[str, str | None]]) -> Any:
    """The object that a dotted expression refers to, or None if it does not belong to tfdist.

    Raises:
        AttributeError, ImportError: the name belongs to tfdist and does not exist.
    """
    if isinstance(node, ast.Attribute):
        base = resolve(node.value, names)
        if base is None:
            return None
        if inspect.ismodule(base) and not hasattr(base, node.attr):
            return importlib.import_module(f"{base.__name__}.{node.attr}")
        return getattr(base, node.attr)
    if not isinstance(node, ast.Name) or node.id not in names:
        return None
    module, name = names[node.id]
    loaded = importlib.import_module(module)
    if name is None or not hasattr(loaded, name):
        return loaded if name is None else importlib.import_module(f"{module}.{name}")
    return getattr(loaded, name)


def strategies(tree: ast.AST, names: dict[str, tuple[str, str | None]]) -> dict[str, type]:
    """The strategy classes of a block's variables. A block without any may use `strategy`."""
    import tfdist.strategies as public

    found: dict[str, type] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and isinstance(node.targets[0], ast.Name):
            called = resolve(node.value.func, names)
            if inspect.isclass(called) and called.__name__ in STRATEGY:
                found[node.targets[0].id] = called
    return found or {"strategy": public.MultiWorkerMirroredStrategy}


def mistakes(source: str, defaults: dict[str, tuple[str, str | None]] | None = None) -> Iterator[str]:
    """The wrong uses of tfdist in a block. `defaults` are names that need no import."""
    tree = ast.parse(source)
    if re.search(r"\bhorovod\b|\btf\.keras\b", source):
        return
    own = imported(tree)
    modules = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    for name in [*own, *(module for module in modules if module.split(".")[0] == "tfdist")]:
        try:
            resolve(ast.Name(name), own) if name in own else importlib.import_module(name)
        except (ImportError, AttributeError) as error:
            yield f"{name}: {error}"
            return
    names = {**(defaults or {}), **own}
    made = strategies(tree, names)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            try:
                called = resolve(node.func, names)
                arguments = [None] * len(node.args)
                if called is not None and not any(isinstance(argument, ast.Starred) for argument in node.args):
                    inspect.signature(called).bind_partial(*arguments, **{k.arg: None for k in node.keywords if k.arg})
            except (ImportError, AttributeError, TypeError) as error:
                yield f"{ast.unparse(node.func)}(...): {error}"
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in made:
            kind = made[node.value.id]
            attributes = {*dir(kind), "mode", "compression_state", "coordinator"}
            if node.attr not in attributes:
                yield f"{ast.unparse(node)}: {kind.__name__} has no such attribute"


def public_names() -> dict[str, tuple[str, str | None]]:
    """The public names, which a snippet may use without imports."""
    names: dict[str, tuple[str, str | None]] = {"tfdist": ("tfdist", None)}
    for module in ("tfdist.strategies", "tfdist.callbacks", "tfdist.compression"):
        names |= {name: (module, name) for name in importlib.import_module(module).__all__}
    return names


CASES = [
    pytest.param(path, line, source, id=f"{path.relative_to(ROOT)}:{number}")
    for path in PAGES
    for number, (line, source) in enumerate(blocks(path.read_text(encoding="utf-8")))
]


@pytest.mark.parametrize(("path", "line", "source"), CASES)
def test_block_is_right(path: Path, line: int, source: str) -> None:
    found = list(mistakes(source, public_names()))
    assert not found, f"{path.relative_to(ROOT)}, line {line}: {found}"


def test_blocks_are_found() -> None:
    assert len(CASES) > 20
    assert {path.name for path in PAGES} >= {"README.md", "index.md", "quick_start.md"}


@pytest.mark.parametrize(
    ("source", "mistake"),
    [
        ("from tfdist.strategies import NoSuchStrategy", "NoSuchStrategy"),
        ("import tfdist.nowhere", "nowhere"),
        ("from tfdist.callbacks import FailureRecovery as F\nF('d', every_step=1)", "every_step"),
        ("FailureRecovery('d', every_step=1)", "every_step"),
        ("import tfdist\ntfdist.strategies.MirroredStrategy(compress='int8')", "compress"),
        ("import tfdist\ntfdist.strategies.MirrorStrategy()", "MirrorStrategy"),
        ("from tfdist.compression import PowerSGD\nPowerSGD(1, 2, 3, 4, 5, 6, 7)", "too many"),
        ("strategy.ranks", "ranks"),
        ("s = ParameterServerStrategy()\ns.micro_batchez", "micro_batchez"),
    ],
)
def test_mistakes_are_found(source: str, mistake: str) -> None:
    assert any(mistake in found for found in mistakes(source, public_names()))


@pytest.mark.parametrize(
    "source",
    [
        "strategy.rank; strategy.gather(x, axis=0); model.fit(x, callbacks=[FailureRecovery('d', every_steps=1)])",
        "s = ParameterServerStrategy(mode=Synchronous(backup_workers=1))\ns.worker_stats",
        "import horovod.tensorflow.keras as hvd\nhvd.init()\nstrategy.ranks",
    ],
)
def test_correct_blocks_pass(source: str) -> None:
    assert not list(mistakes(source, public_names()))


def test_a_block_that_does_not_parse_is_found() -> None:
    ((line, source),) = blocks("text\n\n```python\nif:\n```\n")
    assert line == 4
    with pytest.raises(SyntaxError):
        list(mistakes(source))
