"""`get`: compressors by name, for command-line flags and notebooks."""

from collections.abc import Callable

from tfdist.compression.cast import Cast
from tfdist.compression.compressor import Compressor
from tfdist.compression.dense import Dense
from tfdist.compression.powersgd import PowerSGD
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


def get(identifier: Compressor | str | None) -> Compressor:
    """Returns a compressor, as `keras.optimizers.get` returns an optimizer.

    Args:
        identifier: a `Compressor`, which is returned as it is; None for `Dense()`; or a name: "dense", "bf16", "fp16",
            "fp8", "int8", "int4", "qsgd" (8 bits, stochastic), "sign", "topk:<ratio>", "randomk:<ratio>" or
            "powersgd:<rank>". "topk" is short for "topk:0.01", "randomk" for "randomk:0.01", "powersgd" for
            "powersgd:4".

    Raises:
        ValueError: `identifier` is not a compressor, a known name or None.

    >>> from tfdist import compression
    >>> compression.get("powersgd:2"), compression.get("topk"), compression.get(None)
    (PowerSGD(rank=2, seed=0), TopK(block_size=100, ratio=0.01), Dense())
    """
    if identifier is None:
        return Dense()
    if isinstance(identifier, Compressor):
        return identifier
    if not isinstance(identifier, str):
        raise ValueError(
            f"Invalid compressor. Received: {identifier!r}. Expected: a tfdist.compression.Compressor such as "
            "PowerSGD(rank=4), a name such as 'bf16', or None."
        )
    name = identifier
    method, colon, argument = name.partition(":")
    if not colon and method in _WITHOUT_ARGUMENT:
        return _WITHOUT_ARGUMENT[method]()
    if method in _WITH_ARGUMENT:
        try:
            return _WITH_ARGUMENT[method](argument if colon else _DEFAULT_ARGUMENTS[method])
        except ValueError as error:
            raise ValueError(f"Invalid argument of the compressor name {name!r}: {error}") from error
    expected = [*_WITHOUT_ARGUMENT, *(f"{known}:{value}" for known, value in _DEFAULT_ARGUMENTS.items())]
    raise ValueError(f"Unknown compressor name. Received: {name!r}. Expected: one of {', '.join(expected)}.")
