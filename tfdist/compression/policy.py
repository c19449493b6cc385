"""Which variable is compressed how: rules by path, small tensors dense, dense warm-up, error feedback by default."""

import re
from collections.abc import Mapping, Sequence

from tfdist.compression.compressor import Compressor, elements_of
from tfdist.compression.dense import Dense
from tfdist.compression.error_feedback import ErrorFeedback
from tfdist.compression.momentum import MomentumCorrection
from tfdist.compression.names import compressor_named
from tfdist.compression.warm_up import WarmUp

Rule = Compressor | str | None

_WORTHWHILE = 0.9  # of the dense size; a payload above it is not worth its computation


class Policy:
    """Chooses a compressor for each variable.

    >>> from tfdist.compression import Policy, PowerSGD, TopK
    >>> policy = Policy({"embedding": TopK(0.01), "logits": None, ".*": PowerSGD(4)}, dense_steps=100)
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
        """Makes a policy of rules.

        Args:
          rules: a compressor, or its name ("bf16", "topk:0.01", "powersgd:4"; `compressor_named` has them all), for all
            variables; or a mapping from regular expressions to compressors, names, or `None` for no compression. The
            first expression that is found in a variable's path counts; variables that none is found in stay dense.
          dense_steps: so many first updates travel uncompressed (`WarmUp`).
          dense_below: variables of fewer elements stay uncompressed, as do those that a method would not make smaller.

        Raises:
          ValueError: an argument is not what is expected.
        """
        if isinstance(dense_below, bool) or not isinstance(dense_below, int) or dense_below < 0:
            raise ValueError(
                f"`dense_below` is no number of elements. Received: {dense_below!r}. Expected: a whole number of at "
                "least 0."
            )
        if isinstance(rules, Mapping):
            given = dict(rules)
        else:
            given = {"": rules}
        self.dense_steps, self.dense_below = dense_steps, dense_below
        self._rules = [(_pattern(expression), self._completed(rule)) for expression, rule in given.items()]
        self._dense = Dense()

    @property
    def compresses(self) -> bool:
        """Whether any variable may be compressed."""
        return any(compressor != self._dense for _, compressor in self._rules)

    def compressor_for(self, path: str) -> Compressor:
        """The compressor of the variable at `path`."""
        return next((compressor for pattern, compressor in self._rules if pattern.search(path)), self._dense)

    def compressor_of(self, path: str, shape: Sequence[int]) -> tuple[Compressor, bool]:
        """What reduces the variable at `path`, of `shape`, and whether that needs its state.

        A variable that is not worth compressing travels uncompressed with those that are; but momentum correction,
        which takes the place of the optimizer's momentum, holds for it too.
        """
        compressor = self.compressor_for(path)
        if self.is_worthwhile(path, shape):
            return compressor, True
        corrected = compressor.compressor if isinstance(compressor, WarmUp) else compressor
        return (corrected.uncompressed(), True) if isinstance(corrected, MomentumCorrection) else (compressor, False)

    def is_worthwhile(self, path: str, shape: Sequence[int]) -> bool:
        """Whether the variable at `path`, of `shape`, is compressed; otherwise it travels as it is."""
        elements = elements_of(shape)
        compressor = self.compressor_for(path)
        if compressor == self._dense or elements == 0 or elements < self.dense_below:
            return False
        return compressor.payload_bytes(shape) <= _WORTHWHILE * 4 * elements

    def _completed(self, rule: Rule) -> Compressor:
        """The compressor of a rule, with error feedback where it needs it, and the warm-up."""
        compressor = compressor_named(rule) if isinstance(rule, str) else rule
        if compressor is None:
            return Dense()
        if not isinstance(compressor, Compressor):
            raise ValueError(
                f"This is no compressor. Received: {rule!r}. Expected: a tfdist.compression.Compressor such as "
                "PowerSGD(rank=4), a name such as 'bf16', or None."
            )
        if compressor.needs_error_feedback:
            compressor = ErrorFeedback(compressor)
        return WarmUp(compressor, self.dense_steps) if self.dense_steps and compressor != Dense() else compressor


def _pattern(expression: str) -> re.Pattern[str]:
    try:
        return re.compile(expression)
    except (re.error, TypeError) as error:
        raise ValueError(
            f"A rule's key is no regular expression ({error}). Received: {expression!r}. Expected: an expression to be "
            "found in a variable's path, such as 'embedding' or '.*'."
        ) from error
