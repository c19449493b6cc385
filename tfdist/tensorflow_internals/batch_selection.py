"""Datasets that can be built again for a part of their batches: the rows of one worker, or the batches from a step on.

TensorFlow distributes a dataset by reading all of it on every worker. One that knows how it is built reads only what
the worker needs, and begins in the middle without reading what comes before.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf


@dataclass(frozen=True)
class Selection:
    """Which part of a dataset of global batches is read.

    Attributes:
        replicas_of_workers: The number of replicas of each worker that shares the batches.
        rank: The rank of the worker that reads its rows.
        first_batch: The first batch that is read.
        streams: How many streams of rows the batches take rows from.
    """

    replicas_of_workers: tuple[int, ...] = (1,)
    rank: int = 0
    first_batch: int = 0
    streams: int = 1


class SelectableDataset(tf.data.Dataset):
    """A dataset of global batches that can be built again for a `Selection`.

    `map`, `prefetch` and `with_options` return such a dataset, too: they are applied to each worker's rows. Any other
    transformation returns a plain dataset, of which every worker reads all rows.

    Attributes:
        selection: The part that this dataset reads.
        batch_size: The number of rows of a global batch.
    """

    def __init__(
        self, build: Callable[[Selection], tf.data.Dataset], selection: Selection, batch_size: int, starts: bool = True
    ) -> None:
        """Creates a dataset; `build` returns the dataset of a selection.

        It `starts` anywhere if a dataset that begins with a later batch yields the same batches as one that skips.
        """
        self._build, self._starts = build, starts
        self.selection, self.batch_size = selection, batch_size
        self._built = build(selection)
        super().__init__(tf.data.experimental.to_variant(self._built))

    @property
    def element_spec(self) -> Any:
        return self._built.element_spec

    def _inputs(self) -> list[Any]:
        return [self._built]

    def select(self, **changes: Any) -> "SelectableDataset":
        """Returns this dataset with other fields of its `Selection`; it shares the order of epochs with this one."""
        return SelectableDataset(self._build, replace(self.selection, **changes), self.batch_size, self._starts)

    def skipped(self, batches: int) -> "SelectableDataset | None":
        """Returns this dataset without its first `batches` batches, which are not read.

        None if later batches depend on earlier ones: functions of a `map` draw random numbers, or run Python.
        """
        return self.select(first_batch=self.selection.first_batch + batches) if self._starts else None

    def map(self, map_func: Callable[..., Any], *args: Any, **kwargs: Any) -> tf.data.Dataset:
        """Maps the rows of each worker; see `tf.data.Dataset.map`."""
        mapped = self._then(lambda dataset: dataset.map(map_func, *args, **kwargs))
        mapped._starts = self._starts and not _has_state(mapped._built)
        return mapped

    def prefetch(self, buffer_size: Any, name: Any = None) -> tf.data.Dataset:
        return self._then(lambda dataset: dataset.prefetch(buffer_size, name))

    def with_options(self, options: Any, name: Any = None) -> tf.data.Dataset:
        return self._then(lambda dataset: dataset.with_options(options, name))

    def _then(self, transform: Callable[[tf.data.Dataset], tf.data.Dataset]) -> "SelectableDataset":
        build = self._build
        return SelectableDataset(lambda part: transform(build(part)), self.selection, self.batch_size, self._starts)


def selectable(dataset: Any) -> SelectableDataset | None:
    """Returns the dataset that a user gave, or that was distributed, if it can be built for a selection."""
    dataset = getattr(dataset, "_original_dataset", dataset)
    return dataset if isinstance(dataset, SelectableDataset) else None


def _has_state(dataset: Any) -> bool:
    """Whether the function of a `map` may yield other results if it is not called for earlier batches."""
    for wrapper in dataset._functions():
        if any(tensor.dtype in (tf.resource, tf.variant) for tensor in wrapper.function.captured_inputs):
            return True
        definition = wrapper.function.graph.as_graph_def()
        nodes = [*definition.node, *(node for function in definition.library.function for node in function.node_def)]
        if any("seed" in node.attr or "PyFunc" in node.op for node in nodes):
            return True
    return False
