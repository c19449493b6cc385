"""Compressors by name, for flags and notebooks."""

from collections.abc import Callable

from tfdist.compression.cast import Cast
from tfdist.compression.compressor import Compressor
from tfdist.compression.dense import Dense
from tfdist.compression.low_rank import PowerSGD
from tfdist.compression.quantization import Quantize
from tfdist.compression.sign import Sign
from tfdist.compression.sparsification import RandomK, TopK

_WITHOUT_ARGUMENT: dict[str, Callable[[], Compressor]] = {
    "dense": Dense,
    "bf16": lambda: Cast("bfloat16"),
    "fp16": lambda: Cast("float16"),
    "fp8": lambda: Cast("float8"),
    "int8": lambda: Quantize(8),
    "int4": lambda: Quantize(4),
    "qsgd": lambda: Quantize(8, stochastic=True),
    "sign": Sign,
}
_WITH_ARGUMENT: dict[str, Callable[[str], Compressor]] = {
    "topk": lambda ratio: TopK(float(ratio)),
    "randomk": lambda ratio: RandomK(float(ratio)),
    "powersgd": lambda rank: PowerSGD(int(rank)),
}
_DEFAULT_ARGUMENTS = {"topk": "0.01", "randomk": "0.01", "powersgd": "4"}


def compressor_named(name: str) -> Compressor:
    """The compressor that a name stands for.

    The names are "dense", "bf16", "fp16", "fp8", "int8", "int4", "qsgd" (8 bits, stochastic), "sign", "topk:<ratio>",
    "randomk:<ratio>" and "powersgd:<rank>"; the last three may stand alone: "topk" is "topk:0.01".

    Raises:
      ValueError: there is no such name.

    >>> compressor_named("powersgd:2"), compressor_named("topk")
    (PowerSGD(rank=2, seed=0), TopK(block_size=100, ratio=0.01))
    """
    method, colon, argument = name.partition(":")
    if not colon and method in _WITHOUT_ARGUMENT:
        return _WITHOUT_ARGUMENT[method]()
    if method in _WITH_ARGUMENT:
        try:
            return _WITH_ARGUMENT[method](argument if colon else _DEFAULT_ARGUMENTS[method])
        except ValueError as error:
            raise ValueError(f"The compression {name!r} has no usable argument: {error}") from error
    expected = [*_WITHOUT_ARGUMENT, *(f"{known}:{value}" for known, value in _DEFAULT_ARGUMENTS.items())]
    raise ValueError(
        f"There is no compression of this name. Received: {name!r}. Expected: one of {', '.join(expected)}."
    )
