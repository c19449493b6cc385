"""Results of inner layers that the code of a layer combines element by element, as a gated block multiplies two."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tfdist.keras_internals.inner_calls import InnerCall, InnerCalls
from tfdist.model_parallel.elementwise_functions import ELEMENTWISE

Follows = Callable[[Any], bool]


@dataclass(frozen=True)
class CombinedResults:
    """Results of inner layers that code combines element by element, as those of a gated block.

    Attributes:
        sources: The layers that return them; one if nothing is combined.
        takers: The layers that take the combined values.
        passed: The layers between, which compute element by element.
    """

    sources: list[Any]
    takers: list[Any]
    passed: list[Any]


def combined_results(inner: InnerCalls, layer: Any, passes: Follows) -> CombinedResults | None:
    """Follows what an inner layer returns through layers and code that compute element by element.

    Args:
        inner: The calls inside of a layer.
        layer: An inner layer.
        passes: Whether a layer only passes on what it takes, element by element.

    Returns:
        None if anything else than layers and such code uses it, or nothing; or if a layer is called several times.
    """
    search = _Search(inner, passes)
    return search.result() if search.add_source(layer) and search.follow() else None


class _Search:
    """Which layers' results are combined element by element with those of others, and which layers take them."""

    def __init__(self, inner: InnerCalls, passes: Follows) -> None:
        self._inner, self._passes = inner, passes
        self._numbers = {operation.name: number for number, operation in enumerate(inner.operations)}
        self._returned = {tensor.ref() for tensor in inner.returned}
        self._sources: list[Any] = []
        self._takers: list[Any] = []
        self._passed: list[Any] = []
        self._known: set[Any] = set()
        self._waiting: list[Any] = []
        self._operands: list[Any] = []

    def result(self) -> CombinedResults:
        """Returns what was found; each layer once."""
        return CombinedResults(*([*{id(one): one for one in of}.values()] for of in self._lists))

    @property
    def _lists(self) -> tuple[list[Any], list[Any], list[Any]]:
        return self._sources, self._takers, self._passed

    def add_source(self, layer: Any) -> bool:
        """Adds the result of a layer; False if the layer is called several times, or returns several tensors."""
        own = self._inner.only_call_of(layer)
        if own is None or len(own.outputs) != 1:
            return False
        if not any(layer is one for one in self._sources):
            self._sources.append(layer)
            self._waiting.append(own.outputs[0])
        return True

    def follow(self) -> bool:
        """Follows all results until nothing new is found; False if something else uses them."""
        while self._waiting or self._operands:
            if self._waiting:
                tensor = self._waiting.pop()
                if tensor.ref() not in self._known:
                    self._known.add(tensor.ref())
                    if not self._follow(tensor):
                        return False
            else:
                operand = self._operands.pop()
                if operand.ref() not in self._known and not self._trace_back(operand):
                    return False
        return bool(self._takers)

    def _follow(self, tensor: Any) -> bool:
        if tensor.ref() in self._returned:
            return False
        for operation in tensor.consumers():
            number = self._numbers[operation.name]
            takers = [one for one in self._inner.calls if one.input is tensor and one.first <= number < one.end]
            if takers:
                self._take(min(takers, key=lambda one: one.end - one.first))
            elif operation.type == "IdentityN":  # as that of a custom gradient, which passes its arguments, too
                outputs = zip(operation.inputs, operation.outputs, strict=True)
                self._waiting += [out for one, out in outputs if one is tensor]
            elif operation.type in ELEMENTWISE:
                self._waiting += operation.outputs
                self._operands += [one for one in operation.inputs if not _is_constant_scalar(one)]
            else:
                return False
        return True

    def _take(self, call: InnerCall) -> None:
        if self._passes(call.layer):
            self._passed.append(call.layer)
            self._waiting += call.outputs
        else:
            self._takers.append(call.layer)

    def _trace_back(self, tensor: Any) -> bool:
        """Adds the layers from whose results a tensor was computed; False if it was not computed from such alone."""
        maker = next((one for one in self._inner.calls if any(tensor is out for out in one.outputs)), None)
        if maker is not None and not self._passes(maker.layer):
            return self.add_source(maker.layer)
        operation = tensor.op
        if maker is not None and maker.input is not None:
            self._operands.append(maker.input)
        elif operation.type == "IdentityN":
            self._operands.append(operation.inputs[operation.outputs.index(tensor)])
        elif operation.type in ELEMENTWISE:
            self._operands += [one for one in operation.inputs if not _is_constant_scalar(one)]
        else:
            return False
        return True


def _is_constant_scalar(tensor: Any) -> bool:
    """Whether a tensor is a number of the program, possibly cast."""
    while tensor.op.type in ("Cast", "Identity"):
        tensor = tensor.op.inputs[0]
    return tensor.op.type == "Const" and tensor.shape.rank == 0
