"""The error for a missing private symbol names it with the reason and the remedy, and the documentation lists all."""

import functools
import importlib
import importlib.util
import re
from pathlib import Path

import pytest
from child_environment import run_python

from tfdist.private_symbols import MissingPrivateSymbolError, PrivateSymbol, private, used_symbols

_ROOT = Path(__file__).resolve().parents[1]
_REDUCES = "tensorflow.python.distribute.mirrored_strategy:MirroredExtended._make_collective_ops_with_fallbacks"
_LOSS = "keras.src.losses.loss:reduce_weighted_values"


def load(path):
    """A fresh copy of the module in a file."""
    specification = importlib.util.spec_from_file_location(Path(path).stem, _ROOT / path)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", ["json:gone", "json:JSONDecoder.gone", "json.gone:anything"])
def test_a_missing_symbol_is_named(path):
    with pytest.raises(MissingPrivateSymbolError, match=rf"needs '{path}' \(to try\).*Received: .*Expected: a json"):
        private(path, why="to try")


def test_a_symbol_is_recorded_once():
    private("json:dumps", why="first")
    private("json:dumps", why="again")
    assert [symbol.why for symbol in used_symbols() if symbol.path == "json:dumps"] == ["again"]


@pytest.mark.parametrize(
    ("symbol", "user"),
    [
        (_REDUCES, "tfdist/tensorflow_internals/tensorflow_symbols.py"),
        (_LOSS, "tfdist/keras_internals/keras_symbols.py"),
    ],
)
def test_a_symbol_that_a_library_removed_is_named(symbol, user, cpus, monkeypatch):
    module, _, attributes = symbol.partition(":")
    *owners, attribute = attributes.split(".")
    monkeypatch.delattr(functools.reduce(getattr, owners, importlib.import_module(module)), attribute)
    with pytest.raises(ImportError, match=re.escape(symbol)) as raised:
        load(user)
    assert type(raised.value).__name__ == "MissingPrivateSymbolError"


# Long: the previous test covers the message; this one that `import tfdist.strategies` raises it.
@pytest.mark.long
@pytest.mark.parametrize("symbol", [_REDUCES, _LOSS])
def test_importing_the_strategies_names_a_missing_symbol(symbol):
    module, _, attribute = symbol.partition(":")
    script = f"import {module} as m\ndel m.{attribute}\nimport tfdist.strategies"
    finished = run_python("-c", script, limit_seconds=120, exit_code=1)
    assert "MissingPrivateSymbolError" in finished.stderr and symbol in finished.stderr


def page_differs(page, symbols):
    """The rows that the page's table lacks, and those that it has too many, by module and symbol."""
    table = load("docs/building/private_symbols.py").table(symbols)
    module_and_symbol = re.compile(r"^\| (`(?:tf|keras)[^`]*` \| `[^`]+`) \|", re.MULTILINE)
    return set(module_and_symbol.findall(table)) ^ set(module_and_symbol.findall(page))


def test_the_architecture_page_lists_every_private_symbol(cpus):
    import tfdist.callbacks
    import tfdist.strategies  # noqa: F401

    page = (_ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    differences = page_differs(page, used_symbols())
    assert len(used_symbols()) > 50
    assert not differences, "Run `python docs/building/private_symbols.py`."


def test_a_row_that_is_missing_or_too_many_is_found():
    symbols = [PrivateSymbol("keras.src.tree:flatten", "why"), PrivateSymbol("tensorflow.python.a:b.c", "why")]
    assert not page_differs("| `keras….tree` | `flatten` | why |\n| `tf….a` | `b.c` | why |", symbols)
    assert page_differs("| `keras….tree` | `flatten` | why |", symbols) == {"`tf….a` | `b.c`"}
    assert page_differs("| `keras….x` | `y` | why |", []) == {"`keras….x` | `y`"}
