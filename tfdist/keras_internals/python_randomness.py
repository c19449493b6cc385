"""The random numbers of Python code within a tf.data pipeline: `from_generator`, `py_function`, `numpy_function`."""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from tfdist.keras_internals.generator_search import generators_in
from tfdist.keras_internals.random_states import (
    global_states,
    same,
    set_global_states,
    set_state_of,
    state_of,
)

States = dict[str, Any]


class PythonRandomness:
    """The generators that a pipeline's Python code may draw from, and how they were as the running pass began.

    A pass is drawn again from its beginning to come back to its middle, so that is what has to be kept: the global
    generators of NumPy and Python, and those that the code holds.
    """

    def __init__(self, functions: Iterable[Any]) -> None:
        self._own = generators_in(functions)
        self._at_begin: States = self._present()

    def begin_pass(self) -> None:
        """To be called before an iterator is made."""
        self._at_begin = self._present()

    def states(self, *, within_pass: bool) -> States:
        """The states as the pass began, or now."""
        return self._at_begin if within_pass else self._present()

    def restore(self, states: States) -> None:
        """Puts back the states of the code's own generators; the global ones are everybody's."""
        if len(states["own"]) != len(self._own):
            warnings.warn(
                "The random generators of this data's Python code are not those of before the restart, and begin anew. "
                f"Received: {len(self._own)} of them. Expected: {len(states['own'])}. Some samples of this epoch may "
                "come twice and others not at all. Give `fit` the data that it had, made by the same code.",
                RuntimeWarning,
                stacklevel=2,
            )
            return
        for generator, state in zip(self._own, states["own"], strict=True):
            set_state_of(generator, state)

    @contextmanager
    def pass_again(self, states: States) -> Iterator[None]:
        """A context in which a pass that had begun with `states` is drawn again by this thread.

        Generators that were drawn from in it stay as it leaves them, all others get back what they were before it.
        """
        before, own = global_states(), [state_of(generator) for generator in self._own]
        set_global_states(states)
        self.restore(states)
        began = self._at_begin = self._present()
        yield
        after = self._present()
        set_global_states({name: state for name, state in before.items() if same(began[name], after[name])})
        for generator, state, *both in zip(self._own, own, began["own"], after["own"], strict=True):
            if same(*both):
                set_state_of(generator, state)

    def _present(self) -> States:
        return {**global_states(), "own": [state_of(generator) for generator in self._own]}
