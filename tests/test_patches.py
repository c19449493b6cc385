"""What tfdist replaces in TensorFlow and Keras is installed once, listed, and undone."""

import sys
import types
from collections import Counter
from pathlib import Path

import pytest
from undone_patches import without_patches

import tfdist
from tfdist.keras_internals.strategy_patches import patch_keras
from tfdist.patches import patch, replace, replacements, table
from tfdist.strategies import (
    ModelParallelStrategy,
    ParameterServerStrategy,
    model_parallel_strategy,
    parameter_server_strategy,
    replicated_hooks,
)
from tfdist.strategies.__main__ import main
from tfdist.strategies.replicated_strategy import ReplicatedStrategy

pytestmark = pytest.mark.usefixtures("unpatched")
_LIBRARIES = ("keras", "tensorflow")
_VALUES = {"loss_module", "CONVERSION_RULES"}  # neither functions nor classes


def key(owner, name):
    return (owner.__name__ if isinstance(owner, types.ModuleType) else owner), name


def attributes_of_libraries():
    """The attributes of the modules of TensorFlow and Keras, and of the classes in them."""
    found = {}
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").partition(".")[0] not in _LIBRARIES:
            continue
        for name, value in list(vars(module).items()):
            found[key(module, name)] = value
            if isinstance(value, type) and value.__module__.partition(".")[0] in _LIBRARIES:
                found.update({(value, own): of_class for own, of_class in vars(value).items()})
    return found


def is_of_tfdist(value):
    value = value.fget if isinstance(value, property) else value
    path = value.__code__.co_filename if isinstance(value, types.FunctionType) else ""
    of_class = isinstance(value, type) and value.__module__.startswith("tfdist")
    return of_class or path.startswith(f"{Path(tfdist.__file__).parent}/")


def of_tfdist(attributes):
    return {where for where, value in attributes.items() if is_of_tfdist(value)}


def test_all_is_listed_and_undone(capsys):
    before = attributes_of_libraries()
    assert not of_tfdist(before)
    main()
    listed = capsys.readouterr().out
    replaced = {key(one.owner, one.name) for one in replacements()}
    assert replaced - of_tfdist(attributes_of_libraries()) == {one for one in replaced if one[1] in _VALUES}
    assert of_tfdist(attributes_of_libraries()) <= replaced
    assert all(f".{name}\n" in f"{listed}\n" for _, name in replaced) and listed == f"{table()}\n"
    with without_patches():
        after = attributes_of_libraries()
        assert not of_tfdist(after) and not replacements()
        assert {where for where in replaced if after.get(where) is not before.get(where)} == set()
    assert {key(one.owner, one.name) for one in replacements()} == replaced
    assert replaced - of_tfdist(attributes_of_libraries()) == {one for one in replaced if one[1] in _VALUES}


def test_another_kind_of_strategies_replaces_nothing_again():
    patch_keras(ReplicatedStrategy, replicated_hooks.HOOKS)
    of_first = replacements()
    for kind, module in (
        (ParameterServerStrategy, parameter_server_strategy),
        (ModelParallelStrategy, model_parallel_strategy),
    ):
        patch_keras(kind, module.HOOKS)
    assert replacements() == of_first
    # One attribute serves two purposes: what variables a tape differentiates by, and of which losses.
    layers = Counter((one.owner, one.name) for one in of_first)
    assert [name for (_, name), number in layers.items() if number > 1] == ["gradient"]


class Base:
    def answer(self):
        """Returns a number."""
        return 1


class Inherits(Base):
    pass


@patch
def patch_answer(number):
    """Adds a number."""
    stock = Inherits.answer

    @replace(Inherits, "answer")
    def add(self):
        return stock(self) + number


def test_an_attribute_that_is_inherited_or_new_is_undone():
    for number in (10, 10, 100):
        patch_answer(number)
    assert Inherits().answer() == 111 and Base().answer() == 1
    assert Inherits.answer.__doc__ == "Returns a number." and Inherits.answer.__name__ == "answer"
    with without_patches():
        assert Inherits().answer() == 1 and "answer" not in vars(Inherits)
        patch_answer(10)
        assert Inherits().answer() == 11
    assert Inherits().answer() == 111
    assert table() == f"{__name__}:patch_answer: Adds a number.\n" + "\n".join([f"    {__name__}:Inherits.answer"] * 2)


def test_undoing_leaves_what_others_have_put_back():
    class Owner:
        def answer(self):
            return 1

    @patch
    def install():
        """Answers otherwise."""
        replace(Owner, "answer")(lambda self: 3)

    stock = Owner.answer
    with without_patches():
        Owner.answer = lambda self: 2  # as `monkeypatch` does, and undoes before this context ends
        install()
        Owner.answer = stock
    assert Owner.answer is stock


def test_a_patch_that_fails_is_tried_again():
    fails = [True, False]

    @patch
    def install():
        if fails.pop(0):
            raise ValueError("at first")
        replace(Inherits, "other")(lambda self: 2)

    with pytest.raises(ValueError, match="at first"):
        install()
    install()
    assert Inherits().other() == 2
