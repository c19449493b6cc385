"""The states that a PyDatasetView records of batches and hooks, and when it inspects attributes."""

import random
import warnings

import numpy as np
import pytest
from data_runs import SEED
from py_datasets import NoisyInSome, Remembering, Shuffled
from recovered_runs import STEPS

from tfdist.data_position import py_dataset_source
from tfdist.data_position.py_dataset_source import PyDatasetView, attribute_orders
from tfdist.data_position.python_randomness import set_global_states, states_equal
from tfdist.data_position.read_ahead import ReadAhead
from tfdist.utils.json_state import from_text, to_json, to_text, unsupported_type

pytestmark = pytest.mark.usefixtures("cpus")


@pytest.fixture(autouse=True)
def _strict():
    """Makes warnings outside `pytest.warns` errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


def view_of(data):
    """Returns a view that tracks its position, at the beginning of a pass."""
    view = PyDatasetView(data, shuffle=False)
    view.track_position()
    view.on_epoch_begin()
    view.begin_pass()
    return view


def test_batches_that_draw_sometimes_are_read_again_with_the_same_result():
    view = view_of(NoisyInSome(np.random.shuffle, ()))
    read = [view[number][0].tolist() for number in range(STEPS)]
    for drawn in (2, 4):  # all of them were read ahead
        before = view.order(drawn)["before"]
        assert list(before) == ["numpy"]
        set_global_states({"numpy": from_text(before["numpy"])})
        assert [view._read(number)[0].tolist() for number in range(drawn, STEPS)] == read[drawn:]


def test_draws_of_others_are_not_recorded_if_the_data_draws_nothing():
    ahead, states = ReadAhead(), [np.random.default_rng(seed).bit_generator.state for seed in range(4)]
    for number, (before, after) in enumerate([(0, 0), (1, 1), (1, 2)]):  # others draw while the last batch is read
        ahead.record(number, {"numpy": states[before]}, {"numpy": states[after]})
    assert ahead.before(1) == {}


def test_only_changed_states_of_later_batches_are_kept():
    data = Remembering(SEED)
    view = view_of(data)
    for number in range(STEPS):
        assert view[number] is not None
    order, kept = view.order(2), [state for _, _, state in view._ahead._entries]
    assert order["before"] == {} and len(view._ahead) == STEPS - 2
    assert all(state["indexes"] is kept[0]["indexes"] for state in kept), "one copy of what stays"
    assert states_equal(order["own"], kept[0]) and not states_equal(kept[0], kept[1])
    ahead = ReadAhead()
    for number in range(5000):
        ahead.record(number, {"own": number}, {"own": number + 1})
    assert len(ahead) < 1000 and ahead.before(4990) == {"own": 4990}


def test_draws_are_recorded_as_text_and_their_limit_is_a_warning(monkeypatch):
    monkeypatch.setattr(py_dataset_source, "_MOST_STATES", 3)
    hooks = py_dataset_source.PyDatasetHooks(Shuffled(lambda ids: (np.random.shuffle(ids), random.random())))
    hooks.track_position()
    states = []
    for _ in range(2):
        states.append(to_text(random.getstate()))
        hooks.call(py_dataset_source.END)
        random.seed()
    assert [draw[2]["python"] for draw in hooks.order()["draws"]] == states
    with pytest.warns(RuntimeWarning, match="of a Shuffled have drawn .*so many calls.*Received: 3 calls.*`get_state`"):
        hooks.call(py_dataset_source.END)
    hooks.call(py_dataset_source.END)  # and only once
    assert len(hooks.order()["draws"]) == 3


def test_attributes_are_inspected_only_when_needed(monkeypatch):
    looked = []
    monkeypatch.setattr(
        py_dataset_source, "attribute_orders", lambda source: looked.append(source) or attribute_orders(source)
    )

    def draw(indexes):
        indexes[:] = np.random.permutation(len(indexes))

    hooks = py_dataset_source.PyDatasetHooks(Shuffled(draw))
    for _ in range(5):
        hooks.call(py_dataset_source.END)
    assert len(looked) == 2, "around the first call: the position is not tracked"
    del looked[:]
    hooks.track_position()
    order = hooks.order()
    del looked[:]
    again = py_dataset_source.PyDatasetHooks(Shuffled(draw))
    again.repeat(order, within_epoch=False)
    assert again.calls == [0, 5] and len(looked) == 1, "compared once, at the end"
    again.track_position()
    del looked[:]
    for _ in range(4):
        again.call(py_dataset_source.END)
    assert len(looked) == 4 + 1, "before a call only until an attribute has shown a draw"


class Unrelated(Shuffled):
    """Has unrelated methods of these names."""

    def get_state(self):
        return {"seen": {1, 2}}

    def set_state(self, state):
        raise AssertionError


class OfACountry(Unrelated):
    def get_state(self, country):
        return country


@pytest.mark.parametrize(("kind", "why"), [(Unrelated, "a value of type set"), (OfACountry, "TypeError: .*'country'")])
def test_unsupported_get_state_is_not_saved(kind, why):
    view = PyDatasetView(kind(np.random.shuffle), shuffle=False)
    with pytest.warns(RuntimeWarning, match=f"of a {kind.__name__} is not saved. Received: {why}"):
        view.track_position()
    view.on_epoch_begin()
    view.begin_pass()
    assert view[0] is not None and view.order(1)["own"] is None and not view.has_state


@pytest.mark.parametrize(
    "value",
    [None, True, 1, 1.5, "a", np.float32(1), np.int64(1), np.complex64(1), np.datetime64(0, "s"), np.arange(3), b"a"]
    + [np.array(["a"]), np.array([1j]), [1, {2}], (1, 2), {"a": [np.arange(2)]}, {1: 2}, {"a": object()}],
)
def test_unsupported_type_agrees_with_to_json(value):
    try:
        to_json(value)
    except ValueError:
        assert unsupported_type(value) is not None
    else:
        assert unsupported_type(value) is None
