"""Chooses compressors: by name (`get`), and for each variable by rules, size, warm-up and error feedback."""

import re
from collections.abc import Callable, Mapping, Sequence

from tfdist.compression.cast import Cast
from tfdist.compression.compressor import Compressor, Dense, num_elements
from tfdist.compression.powersgd import PowerSGD
from tfdist.compression.quantization import Quantize, Sign
from tfdist.compression.sparsification import RandomK, TopK
from tfdist.compression.wrappers import ErrorFeedback, MomentumCorrection, WarmUp
from tfdist.utils.argument_checks import check_whole_number

Rule = Compressor | str | None

_WORTHWHILE = 0.9  # A payload of a larger share of the dense size is not worth its computation.
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


class Policy:
    """Chooses a compressor for each variable.

    >>> from tfdist.compression import Policy, PowerSGD, TopK
    >>> policy = Policy({"embedding": TopK(0.01), "logits": None, ".*": PowerSGD(4)}, dense_steps=100)
    >>> Policy("int8")
    Policy('int8', dense_steps=0, dense_below=1024)
    >>> policy.compressor_for("block/dense/kernel")
    WarmUp(compressor=ErrorFeedback(compressor=PowerSGD(rank=4, seed=0)), steps=100)
    >>> policy.compressor_for("logits/kernel")
    Dense()
    >>> policy.is_worthwhile("block/dense/bias", (512,))
    False
    """

    def __init__(
        self, rules: Rule | Mapping[str, Rule] = None, *, dense_steps: int = 0, dense_below: int = 1024
    ) -> None:
        """Creates a policy from rules.

        Args:
            rules: A compressor or its name (see `tfdist.compression.get`) for all variables; or a mapping from regular
                expressions to compressors, names, or `None` for no compression. The first expression that matches a
                part of a variable's path applies. Variables without a match are not compressed.
            dense_steps: The number of first updates that are sent uncompressed (`WarmUp`).
            dense_below: Variables with fewer elements are not compressed. Variables that a method would not make
                smaller are not compressed either.

        Raises:
            ValueError: An argument is invalid.
        """
        check_whole_number("dense_below", dense_below, at_least=0)
        check_whole_number("dense_steps", dense_steps, at_least=0)
        rules_by_expression = dict(rules) if isinstance(rules, Mapping) else {"": rules}
        self._given, self.dense_steps, self.dense_below = rules, dense_steps, dense_below
        self._rules = [
            (_pattern(expression), self._completed(rule)) for expression, rule in rules_by_expression.items()
        ]
        self._dense = Dense()

    def __repr__(self) -> str:
        return f"Policy({self._given!r}, dense_steps={self.dense_steps}, dense_below={self.dense_below})"

    @property
    def compresses(self) -> bool:
        """Whether the policy compresses any variable."""
        return any(compressor != self._dense for _, compressor in self._rules)

    def compressor_for(self, path: str) -> Compressor:
        """Returns the compressor of the variable at `path`, whatever its shape."""
        return next((compressor for pattern, compressor in self._rules if pattern.search(path)), self._dense)

    def resolve(self, path: str, shape: Sequence[int]) -> tuple[Compressor, bool]:
        """Returns the compressor that reduces the variable at `path`, of `shape`, and whether it needs its state.

        A variable that is not worth compressing is sent uncompressed, together with those that are. Momentum
        correction, which replaces the optimizer's momentum, applies to it, too.
        """
        compressor = self.compressor_for(path)
        if self.is_worthwhile(path, shape):
            return compressor, True
        corrected = compressor.compressor if isinstance(compressor, WarmUp) else compressor
        return (corrected.uncompressed(), True) if isinstance(corrected, MomentumCorrection) else (compressor, False)

    def is_worthwhile(self, path: str, shape: Sequence[int]) -> bool:
        """Whether the variable at `path`, of `shape`, is compressed."""
        elements = num_elements(shape)
        compressor = self.compressor_for(path)
        if compressor == self._dense or elements == 0 or elements < self.dense_below:
            return False
        return compressor.payload_bytes(shape) <= _WORTHWHILE * 4 * elements

    def _completed(self, rule: Rule) -> Compressor:
        """Returns the compressor of a rule, wrapped in error feedback if it needs that, and in the warm-up."""
        compressor = get(rule)
        if compressor.needs_error_feedback:
            compressor = ErrorFeedback(compressor)
        return WarmUp(compressor, self.dense_steps) if self.dense_steps and compressor != Dense() else compressor


def _pattern(expression: str) -> re.Pattern[str]:
    try:
        return re.compile(expression)
    except (re.error, TypeError) as error:
        raise ValueError(
            f"The key of a rule is not a regular expression ({error}). Received: {expression!r}. Expected: an "
            "expression to search for in a variable's path, such as 'embedding' or '.*'."
        ) from error


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
    method, colon, argument = identifier.partition(":")
    if not colon and method in _WITHOUT_ARGUMENT:
        return _WITHOUT_ARGUMENT[method]()
    if method in _WITH_ARGUMENT:
        try:
            return _WITH_ARGUMENT[method](argument if colon else _DEFAULT_ARGUMENTS[method])
        except ValueError as error:
            raise ValueError(f"Invalid argument of the compressor name {identifier!r}: {error}") from error
    expected = [*_WITHOUT_ARGUMENT, *(f"{known}:{value}" for known, value in _DEFAULT_ARGUMENTS.items())]
    raise ValueError(f"Unknown compressor name. Received: {identifier!r}. Expected: one of {', '.join(expected)}.")
