"""Python blocks of pages parse, and the names of tfdist in them exist and accept the arguments.

A block with a program of another library (it imports Horovod, or `tf.keras` of Keras 2) is only parsed.
"""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

from page_files import Finding, Pages, line_at

BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
_STRATEGY = ("MirroredStrategy", "MultiWorkerMirroredStrategy", "ParameterServerStrategy", "ModelParallelStrategy")
_CONVERTED, _CONVERTED_PAGE = "examples/migrating/horovod_after.py", "docs/migrating_from_horovod.md"


def code_blocks(pages: Pages) -> Iterator[Finding]:
    """Wrong uses of tfdist. A snippet may use public names without imports."""
    names = _public_names()
    for path, text in pages.markdown.items():
        if path.startswith("examples/"):
            continue
        for match in BLOCK.finditer(text):
            for mistake in mistakes(match[1], names):
                yield Finding(path, line_at(text, match.start(1)), mistake)


def converted_program(pages: Pages) -> Iterator[Finding]:
    """Lines of the page on Horovod that its converted program does not have."""
    text = pages.markdown.get(_CONVERTED_PAGE, "")
    block = next((match for match in BLOCK.finditer(text, max(text.find("After,"), 0))), None)
    if block is None:
        if text:
            yield Finding(_CONVERTED_PAGE, 1, f'no program after the word "After,". Expected: {_CONVERTED}')
        return
    program = re.sub(r"\s", "", (pages.root / _CONVERTED).read_text(encoding="utf-8"))
    program = program.replace("_PASSES", "2").replace("_BATCH_SIZE.value", "64").replace("_EPOCHS.value", "4")
    for number, line in enumerate(block[1].splitlines(), line_at(text, block.start(1))):
        shown = re.sub(r"\s|#.*", "", line)
        if len(shown) > 1 and shown not in program and "checkpoints" not in line and "save" not in line:
            yield Finding(_CONVERTED_PAGE, number, f"{_CONVERTED} has no line {line.strip()!r}")


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
            if inspect.isclass(called) and called.__name__ in _STRATEGY:
                found[node.targets[0].id] = called
    return found or {"strategy": public.MultiWorkerMirroredStrategy}


def mistakes(source: str, defaults: dict[str, tuple[str, str | None]] | None = None) -> Iterator[str]:
    """The wrong uses of tfdist in a block. `defaults` are names that need no import."""
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        yield f"line {error.lineno} of the block: {error.msg}"
        return
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


def _public_names() -> dict[str, tuple[str, str | None]]:
    """The public names, which a snippet may use without imports."""
    names: dict[str, tuple[str, str | None]] = {"tfdist": ("tfdist", None)}
    for module in ("tfdist.strategies", "tfdist.callbacks", "tfdist.compression"):
        names |= {name: (module, name) for name in importlib.import_module(module).__all__}
    return names
