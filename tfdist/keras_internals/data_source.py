"""A tf.data pipeline that an epoch iterator draws from: how its order comes about, and how to begin in its middle."""

import warnings
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.keras_internals.element_description import described
from tfdist.keras_internals.input_pipeline import (
    decisive_batches,
    is_unseeded,
    make_iterator,
    share_a_shuffle,
    shuffle_seeds,
    without_first,
)
from tfdist.keras_internals.pipeline_traits import (
    batch_size,
    is_each_workers_own,
    is_unordered,
    python_functions,
    runs_python,
)
from tfdist.keras_internals.python_randomness import PythonRandomness

Json = dict[str, Any]


class DataSource:
    """A tf.data pipeline, plain or distributed, that `fit` draws from.

    Attributes:
      kind: what it is called in a position and in errors.
      makes_ahead: whether an iterator that Keras makes at the end of an epoch, and often throws away, must be made:
        what a shuffle draws for it counts.
      tells_of_batches: whether the shapes that it declares are those of all batches, not only of those it has seen.
    """

    kind = "tf.data.Dataset"
    makes_ahead = True
    tells_of_batches = True

    def __init__(self, adapter: Any, dataset: Any, strategy: Any) -> None:
        self.adapter = adapter
        self.dataset = dataset
        self.strategy = strategy
        self._python: PythonRandomness | None = None
        self._restored: Json | None = None

    def follow(self, steps_per_epoch: int | None) -> None:
        """To be called once, before training: positions will be asked for."""
        if runs_python(self.dataset):
            self._python = PythonRandomness(python_functions(self.dataset))
        if is_unordered(self.dataset):
            warnings.warn(
                "The order of this data cannot be had again: it is allowed to come as it gets ready. After a restart "
                "training goes on at the right step, but some samples of the epoch may come twice and others not at "
                "all. Received: `deterministic=False`, of the data set's options or of a part of it. Expected: "
                "`deterministic=True`, or nothing said of it.",
                RuntimeWarning,
                stacklevel=2,
            )
        if is_unseeded(shuffle_seeds(self.dataset)):
            warnings.warn(
                "The order of this data cannot be had again: a shuffle, or a random operation, has no seed. After a "
                "restart training goes on at the right step, but some samples of the epoch may come twice and others "
                "not at all. Call `keras.utils.set_random_seed` before the data set is made, or give `shuffle(…, "
                "seed=…)`.",
                RuntimeWarning,
                stacklevel=2,
            )

    def order(self, drawn: int | None) -> Json:
        """What, beside the numbers drawn, decides which samples come next: numbers, strings, arrays, and the like.

        Args:
          drawn: how many batches were drawn of the iterator in use; `None` if the next epoch makes a new one.
        """
        python = None if self._python is None else self._python.states(within_pass=drawn is not None)
        return {"seeds": shuffle_seeds(self.dataset), "python": python}

    def check(self, order: Json, drawn: Sequence[int], replay: bool) -> None:
        """Raises, or warns, if what `order` stood for cannot be had again; before anything is drawn."""
        seeds = shuffle_seeds(self.dataset)
        if order["seeds"] != seeds and not is_unseeded(order["seeds"]):
            warnings.warn(
                "The data comes in another order than before the restart: some samples of this epoch may come twice "
                f"and others not at all. Received: seeds {seeds} of its shuffles. Expected: "
                f"{order['seeds']}. Call `keras.utils.set_random_seed` before the data set is made, or give "
                "`shuffle(…, seed=…)`.",
                RuntimeWarning,
                stacklevel=2,
            )

    def begin_epoch(self, number: int) -> None:
        """Called in the main thread before an epoch whose iterator will be number `number` of this `fit`, from 0."""

    def shares_a_shuffle(self, other: "DataSource") -> bool:
        """Whether an iterator of one moves the order of the other on."""
        return share_a_shuffle(self.dataset, other.dataset)

    @property
    def batch_size(self) -> int | None:
        """How many samples a batch of all workers has; `None` where that is not known."""
        return batch_size(self.dataset) if self.tells_of_batches else None

    def elements(self) -> list[Any] | None:
        """What `described` tells of the batches; `None` where the data does not tell."""
        try:
            return described(self.dataset.element_spec, with_sizes=self.tells_of_batches)
        except AttributeError:
            return None

    def is_each_workers_own(self) -> bool:
        """Whether other workers are at other positions, in data of their own."""
        return is_each_workers_own(self.dataset)

    @property
    def runs_python(self) -> bool:
        """Whether Python code that may draw random numbers makes the samples."""
        return self._python is not None

    def iterator(self) -> Any:
        """A new iterator from the beginning."""
        if self._python is not None:
            self._python.begin_pass()
        return iter(self.dataset)

    def decisive_batches(self) -> int | None:
        """How many batches of an iterator must be drawn for it to decide the order of later ones; `None`: all."""
        return decisive_batches(self.dataset) if self.makes_ahead else 0

    def repeat_iterators(self, drawn: Sequence[int]) -> int:
        """Does what iterators of which these numbers of batches were drawn did to the order of later ones.

        Returns:
          How many batches were drawn for it.
        """
        decisive, total = self.decisive_batches(), 0
        for number in drawn:
            number = number if decisive is None else min(number, decisive)
            if number:
                total += _draw(iter(self.dataset), number)
            else:
                make_iterator(self.dataset)
        return total

    def restore(self, order: Json, batches: int | None, within_epoch: bool) -> None:
        """Prepares for what comes next.

        Args:
          order: what `order` had returned.
          batches: how many batches had been drawn of the iterator in use; `None` if the next epoch makes a new one.
          within_epoch: whether an epoch goes on, and not a new one begins.
        """
        self._restored = order.get("python")
        if self._python is not None and self._restored is not None and batches is None:
            self._python.restore(self._restored)

    def iterator_at(self, batches: int) -> Any:
        """An iterator of which the first `batches` batches have been drawn."""
        if self._python is None or self._restored is None:
            return self._iterator_at(batches)
        with self._python.pass_again(self._restored):
            return self._iterator_at(batches)

    def _iterator_at(self, batches: int) -> Any:
        # All but the last are passed over within tf.data; drawing that one waits for it.
        shorter = without_first(self.dataset, batches - 1) if batches > 1 else None
        iterator = iter(self.dataset if shorter is None else shorter)
        _draw(iterator, batches if shorter is None else 1)
        return iterator


def _draw(iterator: Any, batches: int) -> int:
    """Draws so many batches, or all there are; returns how many."""
    for drawn in range(batches):
        try:
            next(iterator)
        except (StopIteration, tf.errors.OutOfRangeError):
            return drawn
    return batches
