"""Every private attribute of another library's objects that tfdist uses has a row, and a small object that has it."""

import ast
from dataclasses import replace
from pathlib import Path

import keras
import pytest
from child_environment import SUPPORT, run_python
from foreign_attributes import attribute_uses, foreign_attributes, is_private

import tfdist.callbacks
import tfdist.strategies  # noqa: F401
from tfdist import private_symbols
from tfdist.private_symbols import (
    InstanceKind,
    MissingPrivateSymbolError,
    PrivateSymbol,
    check_attributes,
    instance_kinds,
    private_attributes,
    used_symbols,
)

_ROOT = Path(__file__).resolve().parents[1]
_SOURCES = {
    path.relative_to(_ROOT).as_posix(): path.read_text(encoding="utf-8")
    for folder in ("tfdist", "strategies", "callbacks")
    for path in sorted((_ROOT / folder).rglob("*.py"))
    if not path.relative_to(_ROOT).as_posix().startswith(("tfdist/strategies/", "tfdist/callbacks/"))
}
_TABLES = ("keras_attributes.py", "tensorflow_attributes.py", "keras_symbols.py", "tensorflow_symbols.py")

_OWN = "tfdist's own, of a class in another file"
_PARAMS = "PySpark's way to write estimators: its methods for subclasses of `Params`"
_BRIDGE = "PySpark's way to Spark's own objects, which its Python has no names for"
EXCEPTIONS = {
    "_gather": _OWN,
    "_kind_and_config": _OWN,
    "_replicas_of_workers": _OWN,
    "_table_shards": "tfdist's own, kept on an embedding of Keras",
    "_getframe": "of Python's `sys`, and documented",
    "_replace": "of named tuples, and documented",
    "_copyValues": _PARAMS,
    "_dummy": _PARAMS,
    "_paramMap": _PARAMS,
    "_resetUid": _PARAMS,
    "_setDefault": _PARAMS,
    "_jsc": _BRIDGE,
    "_jvm": _BRIDGE,
}
# Rows of what is not called by this name.
REFERENCES = {
    "_get_function": "is called by the name that it is assigned to",
    "_run_through_graph": "is repeated in tfdist's own words",
}


def names_of_rows() -> set[str]:
    """The names in the paths of rows, also of those for later versions of a library than this one."""
    paths = [symbol.path for symbol in used_symbols()]
    for node in (node for source in _SOURCES.values() for node in ast.walk(ast.parse(source))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "private":
            paths += [ast.literal_eval(node.args[0])] if any(word.arg == "since" for word in node.keywords) else []
    return {name for path in paths for name in path.replace(":", ".").split(".")}


def used_names(sources: dict[str, str]) -> set[str]:
    """The private names that code reads, writes, replaces or overrides, or names in a string."""
    names: set[str] = set()
    for path, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.Constant) and is_private(node.value) and not path.endswith(_TABLES):
                names.add(node.value)
            elif isinstance(node, ast.Attribute) and is_private(node.attr) and not path.endswith(_TABLES[:2]):
                names.add(node.attr)
    return names


def test_every_foreign_attribute_has_a_row():
    rows = names_of_rows()
    found = foreign_attributes(_SOURCES)
    unlisted = {name: sorted(places) for name, places in found.items() if name not in rows and name not in EXCEPTIONS}
    assert not unlisted, "Add them to keras_attributes.py or tensorflow_attributes.py."
    assert len(found) > 150


def test_only_internals_use_private_attributes():
    found = foreign_attributes(_SOURCES)
    outside = {
        name: sorted(place for place in places if "_internals/" not in place)
        for name, places in found.items()
        if name not in EXCEPTIONS
    }
    assert not {name: places for name, places in outside.items() if places}, "Read them in a function of the internals."


def test_every_exception_is_needed():
    found, rows = foreign_attributes(_SOURCES), names_of_rows()
    assert {name for name in EXCEPTIONS if name not in found or name in rows} == set()


def test_every_row_is_used():
    names = used_names(_SOURCES)
    attributes = {symbol.path for symbol in used_symbols() if "." in symbol.path.partition(":")[2]}
    last = {path: path.rpartition(".")[2] for path in attributes}
    unused = {path for path, name in last.items() if is_private(name) and name not in names | set(REFERENCES)}
    assert not unused, "Remove these rows."
    assert {name for name in REFERENCES if name in names or name not in last.values()} == set()


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def f(model):\n    return model._compile_loss", {"_compile_loss"}),
        ("def f(model):\n    return getattr(model, '_remat_mode', None)", {"_remat_mode"}),
        ("def f(model):\n    model._jit_compile = False", {"_jit_compile"}),
        ("class A(B):\n    def f(self):\n        return self._queue", {"_queue"}),
        ("class A(B):\n    def _f(self):\n        return super()._f()", {"_f"}),
        ("class A:\n    def __init__(self):\n        self._mine = 1\ndef f(a):\n    return a._mine", set()),
        ("class A:\n    _mine: int\n    def f(self):\n        return self._mine", set()),
        ("from other import Base\nclass A(Base):\n    def f(self):\n        return self._of_base", set()),
        ("from other import Base\nclass A(Base):\n    def f(self, x):\n        return x._of_base", {"_of_base"}),
        ("def f(x):\n    return x.__dict__, x.public, _f(x)", set()),
    ],
)
def test_foreign_attributes_are_told_from_own_ones(source, found):
    base = "class Base:\n    def _of_base(self): pass"
    assert set(foreign_attributes({"tfdist/a_internals/a.py": source, "tfdist/other.py": base})) == found


def test_uses_have_their_places():
    source = "def f(x):\n    return x._a\n"
    assert foreign_attributes({"tfdist/a_internals/a.py": source}) == {"_a": {"tfdist/a_internals/a.py:2"}}
    assert [name for _, _, name in attribute_uses(ast.parse("delattr(x, '_b')"))] == ["_b"]


@pytest.mark.parametrize("kind", [kind for kind in instance_kinds() if kind.make], ids=lambda kind: kind.path)
def test_a_small_object_has_the_attributes(kind, cpus):
    assert kind.missing() == []


def test_the_objects_of_a_cluster_have_the_attributes():
    finished = run_python(SUPPORT / "coordinator_objects.py", limit_seconds=120, CUDA_VISIBLE_DEVICES="-1")
    expected = sum(len(kind.attributes) for kind in instance_kinds() if kind.make is None)
    assert finished.stdout == f"{expected} attributes, 0 unused objects of 2 servers\n", finished.stderr[-2000:]


def test_an_attribute_that_a_library_removed_is_named(cpus):
    (kind,) = (kind for kind in instance_kinds() if kind.path == "keras:Model()")
    model = kind.make()
    del model._compile_loss, model._compile_metrics
    with pytest.raises(MissingPrivateSymbolError) as raised:
        check_attributes([replace(kind, make=lambda: model)])
    message = str(raised.value)
    assert message.startswith(
        "tfdist needs 'keras:Model()._compile_loss' (the compiled losses), which the installed keras "
        f"{keras.__version__} does not have. Received: an instance of Functional without _compile_loss, nor "
        "'keras:Model()._compile_metrics'. Expected: a keras version within the range"
    )


def test_an_object_that_cannot_be_created_is_named():
    def fail():
        raise TypeError("got an unexpected\nargument")

    symbol = PrivateSymbol("json:Thing()._part", "to try")
    with pytest.raises(MissingPrivateSymbolError, match=r"'json:Thing\(\)\._part' \(to try\).*Received: TypeError"):
        check_attributes([InstanceKind("json:Thing()", {"_part": symbol}, fail)])


def test_recording_creates_nothing(monkeypatch):
    monkeypatch.setattr(private_symbols, "_used", {})
    monkeypatch.setattr(private_symbols, "_instance_kinds", {})
    created = []
    private_attributes("json:Thing()", {"_part": "to try"}, lambda: created.append(1))
    private_attributes("json:Other()", {"_part": "to try"})
    assert [symbol.path for symbol in used_symbols()] == ["json:Other()._part", "json:Thing()._part"]
    assert not created
    with pytest.raises(MissingPrivateSymbolError, match=r"Thing\(\)\._part.*an instance of NoneType without _part\."):
        check_attributes()
    assert created
    assert check_attributes(kind for kind in instance_kinds() if kind.make is None) == 0


def test_pyspark_has_the_names_of_the_exceptions():
    params, context = pytest.importorskip("pyspark.ml.param").Params, pytest.importorskip("pyspark").SparkContext
    names = ("_copyValues", "_dummy", "_resetUid", "_set", "_setDefault")
    assert [name for name in names if not hasattr(params, name)] == []
    assert params()._paramMap == {}
    assert hasattr(context, "_jvm") and "_jsc" in context._do_init.__code__.co_names
