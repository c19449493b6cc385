"""Lets go of the graphs of a finished model's steps, which TensorFlow holds until the process ends."""

import contextlib
import inspect
import weakref
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdist.private_symbols import private
from tfdist.tensorflow_internals.tensorflow_symbols import gradient_registry

_SymbolicTensor = private("tensorflow.python.framework.ops:SymbolicTensor", "a tensor of a graph")
_PREFIX = "CustomGradient-"  # of the names under which they are registered

_graphs_of: weakref.WeakKeyDictionary[Any, "weakref.WeakSet[Any]"] = weakref.WeakKeyDictionary()


def release_with(owner: Any) -> None:
    """Releases the graph that is being traced, and those of functions in it, when `owner` has been deleted.

    Whenever a `tf.custom_gradient` is traced, TensorFlow registers its gradient under a new name, and never removes it:
    megabytes for each model in a process that trains many, also without a strategy. Nobody computes gradients of a
    model's step when the model is gone.
    """
    graphs = _graphs_of.get(owner)
    if graphs is None:
        graphs = _graphs_of[owner] = weakref.WeakSet()
        weakref.finalize(owner, _release, graphs).atexit = False
    graphs.add(tf.compat.v1.get_default_graph())


def _release(graphs: "weakref.WeakSet[Any]") -> None:
    for name, registered in list(gradient_registry._registry.items()):
        if not name.startswith(_PREFIX):
            continue
        if any(graph in graphs for tensor in _tensors_of(registered["type"]) for graph in _outward(tensor.graph)):
            gradient_registry._registry.pop(name, None)


def _tensors_of(function: Any) -> Iterator[Any]:
    """Yields the symbolic tensors that a gradient computes with: its variables and those of functions that it calls."""
    waiting, seen = [function], set()
    while waiting:
        value = waiting.pop()
        if isinstance(value, _SymbolicTensor):
            yield value
        elif id(value) not in seen:
            seen.add(id(value))
            waiting += value if isinstance(value, list | tuple) else []
            for cell in (inspect.isfunction(value) and value.__closure__) or ():
                with contextlib.suppress(ValueError):  # the cell is empty
                    waiting.append(cell.cell_contents)


def _outward(graph: Any) -> Iterator[Any]:
    """Yields a graph and those around it."""
    while graph is not None:
        yield graph
        graph = getattr(graph, "outer_graph", None)
