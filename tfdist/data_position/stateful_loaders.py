"""Loaders that return and take their own position: datasets of Grain, torchdata's `StatefulDataLoader`."""

import base64
import contextlib
import json
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from tfdist.keras_internals.epoch_iterator import GRAIN, TORCH

_ADDRESS = re.compile(rb" at 0x[0-9a-f]+")


class StatefulLoader(Protocol):
    """A loader whose iterators have a state. A pass is what one iterator yields."""

    @property
    def kind(self) -> str:
        """The kind of data, in positions and error messages."""
        ...

    @property
    def draws_in_order(self) -> bool:
        """Whether reading a batch runs the program's Python code, in the thread that asks for it."""
        ...

    def iterator(self) -> Iterator[Any]:
        """Begins a pass."""
        ...

    def state(self, iterator: Iterator[Any]) -> Any:
        """Returns the state with which an iterator will draw its next batch; numbers, strings, arrays and nests."""
        ...

    def iterator_at(self, state: Any) -> Iterator[Any]:
        """Returns an iterator that continues from a state."""
        ...

    def state_between(self, state: Any) -> Any:
        """Returns the state with which the next pass will begin. The last one was left at `state`."""
        ...

    def iterator_after(self, state: Any) -> Iterator[Any]:
        """Begins the pass that follows at a state that `state_between` returned."""
        ...


def stateful_loader(kind: str, data: Any) -> StatefulLoader | None:
    """Returns the loader of data, of a kind that Keras knows; `None` if it has no state."""
    if kind == GRAIN:
        return GrainLoader(data)
    has_state = all(callable(getattr(data, name, None)) for name in ("state_dict", "load_state_dict"))
    return TorchLoader(data) if kind == TORCH and has_state else None


class GrainLoader:
    """`grain.MapDataset`, `grain.IterDataset` or `grain.DataLoader`. All passes are equal, as in Grain."""

    kind = GRAIN
    draws_in_order = False  # Grain reads in other threads, or in processes

    def __init__(self, data: Any) -> None:
        self._data = data

    def iterator(self) -> Iterator[Any]:
        return iter(self._data)

    def state(self, iterator: Iterator[Any]) -> Any:
        state = iterator.get_state()  # type: ignore[attr-defined]
        return encode_state(_ADDRESS.sub(b"", state) if isinstance(state, bytes) else state)

    def iterator_at(self, state: Any) -> Iterator[Any]:
        iterator, decoded = self.iterator(), decode_state(state)
        if isinstance(decoded, bytes):
            decoded = _with_addresses(decoded, iterator.get_state())  # type: ignore[attr-defined]
        iterator.set_state(decoded)  # type: ignore[attr-defined]
        return iterator

    def state_between(self, state: Any) -> Any:
        return None

    def iterator_after(self, state: Any) -> Iterator[Any]:
        return self.iterator()


class TorchLoader:
    """A `torch.utils.data.DataLoader` with `state_dict` and `load_state_dict`, as torchdata's has them.

    Its state leaves out PyTorch's random generators: those that the loader was given and the global one, from which
    iterators draw seeds, and transformations of samples their random numbers.
    """

    kind = "StatefulDataLoader"

    def __init__(self, data: Any) -> None:
        self._data = data
        self._torch = sys.modules["torch"]

    @property
    def draws_in_order(self) -> bool:
        return not getattr(self._data, "num_workers", 0)

    def iterator(self) -> Iterator[Any]:
        return iter(self._data)

    def state(self, iterator: Iterator[Any]) -> Any:
        # The loader knows its newest iterator only, which may be that of a validation.
        own = getattr(iterator, "state_dict", self._data.state_dict)()
        return {"loader": encode_state(own), "generators": self._generators()}

    def iterator_at(self, state: Any) -> Iterator[Any]:
        self._data.load_state_dict(decode_state(state["loader"]))
        iterator = self.iterator()  # draws from the generators
        own, common = decode_state(state["generators"])
        if own is not None:
            self._data.generator.set_state(own)
        self._torch.set_rng_state(common)
        return iterator

    def state_between(self, state: Any) -> Any:
        return {**state, "generators": self._generators()}

    def iterator_after(self, state: Any) -> Iterator[Any]:
        self.iterator_at(state)  # the order of a pass depends on the iterators that were made before
        return self.iterator()

    def _generators(self) -> Any:
        own = getattr(self._data, "generator", None)
        return encode_state([None if own is None else own.get_state(), self._torch.get_rng_state()])


def encode_state(value: Any) -> Any:
    """Copies a state in terms of lists, strings, numbers and arrays: bytes, tensors of PyTorch and keys of any type.

    >>> decode_state(encode_state({"next": (1, 2), 0: b"state"}))
    {'next': (1, 2), 0: b'state'}
    """
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, Mapping):
        return {"items": [[encode_state(key), encode_state(item)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        parts = [encode_state(item) for item in value]
        return parts if isinstance(value, list) else tuple(parts)
    if type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "numpy"):
        return {"tensor": np.array(value.numpy())}
    return np.array(value) if isinstance(value, np.ndarray) else value


def decode_state(value: Any) -> Any:
    """Returns the state that `encode_state` was given."""
    if isinstance(value, dict):
        if "bytes" in value:
            return base64.b64decode(value["bytes"])
        if "tensor" in value:
            return sys.modules["torch"].from_numpy(value["tensor"])
        return {decode_state(key): decode_state(item) for key, item in value["items"]}
    if isinstance(value, list | tuple):
        parts = [decode_state(item) for item in value]
        return parts if isinstance(value, list) else tuple(parts)
    return value


def _with_addresses(saved: bytes, present: bytes) -> bytes:
    """Returns a saved state of a `grain.DataLoader` with the addresses of this process.

    Grain compares the `repr` of the data source and of the sampler, in which Python writes the address of an object.
    """
    with contextlib.suppress(ValueError):
        state, now = json.loads(saved), json.loads(present)
        for name, text in now.items():
            if isinstance(text, str) and _ADDRESS.sub(b"", text.encode()) == str(state.get(name)).encode():
                state[name] = text
        return json.dumps(state, indent=4).encode()
    return saved
