"""Each kind of strategies has the hooks that were registered for it."""

import itertools

import pytest

from tfdist import strategy_hooks
from tfdist.strategy_hooks import StrategyHooks, has_hooks, hooks_of, register_hooks


class General:
    pass


class Other:
    pass


class Specific(General, Other):
    pass


class Derived(Specific):
    pass


@pytest.mark.parametrize("order", list(itertools.permutations([General, Other, Specific])))
def test_a_strategy_has_the_hooks_of_its_most_specific_class_in_any_order_of_registration(monkeypatch, order):
    monkeypatch.setattr(strategy_hooks, "_hooks", {})
    hooks = {kind: StrategyHooks(has_copies=True) for kind in order}
    for kind in order:
        register_hooks(kind, hooks[kind])
    for kind, registered in {General: General, Other: Other, Specific: Specific, Derived: Specific}.items():
        assert hooks_of(kind()) is hooks[registered]


def test_a_class_without_hooks_of_its_own_has_those_of_its_first_base_that_has_any(monkeypatch):
    monkeypatch.setattr(strategy_hooks, "_hooks", {})
    hooks = StrategyHooks(has_copies=True)
    register_hooks(Other, hooks)
    assert hooks_of(Derived()) is hooks
    assert not has_hooks(General()) and not has_hooks(None)
