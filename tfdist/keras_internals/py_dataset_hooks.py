"""The hooks of a PyDataset, which often shuffle: called, and called again after a restart with the same random numbers.

What a hook draws from the global generators of NumPy and Python depends on all that was drawn before. So the state that
a hook began to draw with is kept for every call that drew, and is there again when the call is repeated.
"""

import warnings
import zlib
from typing import Any

import keras

from tfdist.keras_internals.attribute_orders import Orders, attribute_orders, reordered
from tfdist.keras_internals.random_states import global_states, packed, same, set_global_states, unpacked

Json = dict[str, Any]

BEGIN, END = 0, 1
_NAMES = ("on_epoch_begin", "on_epoch_end")
_MOST_STATES = 1000  # of 3 KB each, in every checkpoint


class PyDatasetHooks:
    """Calls `on_epoch_begin` and `on_epoch_end` of a PyDataset.

    Attributes:
      calls: how often each of the two has been called.
    """

    def __init__(self, source: Any) -> None:
        self.calls = [0, 0]
        self._source = source
        self._follows = self._repeating = False
        self._orders: Orders = {}
        self._now_begun_with = {name: zlib.crc32(repr(state).encode()) for name, state in global_states().items()}
        self._begun_with = self._now_begun_with  # of the run that the first checkpoint is of
        # By call: the states that it drew with, packed when noted; `None` for the state that the call before it left.
        self._draws: list[tuple[int, int, Json]] = []
        self._left: Json = {}
        self._repeats: dict[tuple[int, int], Json] = {}
        self._shown: set[str] = set()  # attributes that show what was drawn
        self._hidden: set[str] = set()  # generators of which a draw shows nowhere
        self._unclassified = {BEGIN, END}  # hooks of which it is not known yet what shows their draws
        self._expected: Json | None = None

    def follow(self) -> None:
        """Has it look at the data's attributes from now on, which takes a while where they are large."""
        self._follows = True
        self._orders = attribute_orders(self._source)

    def call(self, hook: int) -> None:
        """Calls a hook, `BEGIN` or `END`."""
        self.calls[hook] += 1
        number = self.calls[hook]
        repeated, present = self._repeats.pop((hook, number), None), global_states()
        began = present
        if repeated is not None:
            states = {
                name: self._left.get(name) if state is None else unpacked(state) for name, state in repeated.items()
            }
            set_global_states({name: state for name, state in states.items() if state is not None})
            began = global_states()
        looks = (self._follows or number == 1) and not self._repeating and not self._does_nothing(hook)
        classifies = looks and hook in self._unclassified
        before = attribute_orders(self._source) if classifies else {}
        getattr(self._source, _NAMES[hook])()
        after = global_states()
        if looks:
            self._orders = attribute_orders(self._source)
        drawn = [name for name in after if not same(began[name], after[name])]
        if drawn:
            self._note(hook, number, {name: began[name] for name in drawn}, repeated is not None)
            if classifies:
                shown = [name for name in self._orders if before.get(name) != self._orders[name]]
                self._shown.update(shown)
                self._hidden.update([] if shown else drawn)
                self._unclassified.discard(hook)
        self._left.update({name: after[name] for name in drawn})
        if repeated is not None:
            set_global_states(present)
        if not self._repeating:
            self._compare()

    def order(self) -> Json:
        """What decides in which order the data is now."""
        return {
            "hooks": list(self.calls),
            "draws": [list(draw) for draw in self._draws],
            "begun_with": self._begun_with,
            "orders": self._orders,
            "shown": sorted(self._shown),
            "hidden": sorted(self._hidden),
        }

    def repeat(self, order: Json, within_epoch: bool) -> None:
        """Calls the hooks as often as they had been called when `order` was taken.

        Args:
          order: what `order` had returned.
          within_epoch: whether the last call of `on_epoch_begin` is left to Keras.
        """
        begins, ends = order["hooks"][BEGIN] - within_epoch, order["hooks"][END]
        made = {(hook, number): states for hook, number, states in self._draws}
        self._draws = [(hook, number, states) for hook, number, states in order["draws"]]
        self._repeats = {(hook, number): states for hook, number, states in self._draws}
        self._shown, self._hidden, self._begun_with = set(order["shown"]), set(order["hidden"]), order["begun_with"]
        self._expected, self._repeating = order, True
        for hook, number in [call for call in made if not same(made[call], self._repeats.get(call))]:
            # Keras has made it before `fit` was known to go on; one that draws a whole order anew does no harm twice.
            self.calls[hook] = number - 1
            self.call(hook)
        while self.calls[END] < ends:
            if self.calls[BEGIN] < begins and self.calls[BEGIN] <= self.calls[END]:
                self.call(BEGIN)
            self.call(END)
        while self.calls[BEGIN] < begins:
            self.call(BEGIN)
        self._repeating = False
        self._orders = attribute_orders(self._source)
        self._compare()

    def pass_over(self, order: Json, within_epoch: bool) -> None:
        """Counts those calls without making them: the data has a state of its own, which is put back."""
        self.calls = [order["hooks"][BEGIN] - within_epoch, order["hooks"][END]]

    def _note(self, hook: int, number: int, states: Json, is_known: bool) -> None:
        if is_known or len(self._draws) >= _MOST_STATES:
            return
        kept = {name: None if same(state, self._left.get(name)) else packed(state) for name, state in states.items()}
        self._draws.append((hook, number, kept))
        if len(self._draws) == _MOST_STATES and self._follows:
            name = type(self._source).__name__
            warnings.warn(
                f"The hooks of a {name} have drawn random numbers so often that checkpoints keep no more of it. "
                f"Received: {_MOST_STATES} calls that have drawn from `np.random` or `random`. Expected: fewer. After "
                f"a restart in a later epoch its order is another one: give {name} the methods `get_state` and "
                "`set_state`, or have it draw from a generator of its own, `np.random.default_rng(seed)`.",
                RuntimeWarning,
                stacklevel=2,
            )

    def _does_nothing(self, hook: int) -> bool:
        return getattr(type(self._source), _NAMES[hook], None) is getattr(keras.utils.PyDataset, _NAMES[hook])

    def _compare(self) -> None:
        """Warns if the order is not that of the run that goes on, once as many calls have been made."""
        expected = self._expected
        if expected is None or self.calls != expected["hooks"]:
            return
        self._expected = None
        orders: Orders = expected["orders"]
        differing = reordered(orders, self._orders)
        differing += [name for name in expected["shown"] if orders.get(name) != self._orders.get(name)]
        unsure = [name for name in expected["hidden"] if expected["begun_with"][name] != self._now_begun_with[name]]
        if differing or unsure:
            name = type(self._source).__name__
            if differing:
                what = f"its attribute {differing[0]!r} differs"
            else:
                what = f"its hooks draw from the generator of {unsure[0]}, which was at another state before `fit`"
            warnings.warn(
                f"The batches of a {name} come in another order than before the restart. Received: {what}. Expected: "
                "the same random numbers in every run. Some samples of this epoch may come twice and others not at "
                f"all. Give {name} the methods `get_state` and `set_state`, have it draw from a generator of its own, "
                "`np.random.default_rng(seed)`, or call `keras.utils.set_random_seed` first.",
                RuntimeWarning,
                stacklevel=2,
            )
