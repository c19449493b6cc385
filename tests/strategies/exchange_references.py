"""NumPy's whole exchange of `exchange_model`, with error feedback, step by step."""

import exchange_model
import numpy as np
import numpy_references as references


def _references():
    factor = np.asarray(exchange_model.LOW_RANK.initial_state(exchange_model.SHAPES["powersgd"])["factor"])
    return {
        "int8": references.OfBlocks(256, references.integers(127)),
        "sign": references.OfBlocks(64, references.signs),
        "topk": references.OfBlocks(64, references.largest_values(6), two_phases=False),
        "randomk": references.AtPositions(20),
        "powersgd": references.LowRank([factor]),
        "bf16": references.OfBlocks(2, references.bfloat16),
        "fp8": references.OfBlocks(128, references.float8_by_float16),
        "bias": references.Exactly(),
    }


def differences(delivered, gradients):
    """How far each variable's sums and residuals are from NumPy's.

    Args:
      delivered: of each step, by variable: the sum that all have received.
      gradients: `gradients(name, step)` are those of the members of the compressed exchange, one each.

    Returns:
      By variable the largest differences of the sums, in parts of their largest value, but for two values that may
      have stood on a tie; and the last residuals, by variable, one a member.
    """
    found, last = {}, {}
    for name, reference in _references().items():
        residuals, found[name] = None, 0.0
        for step, sums in enumerate(delivered):
            given = gradients(name, step)
            corrected = given if residuals is None else [g + r for g, r in zip(given, residuals, strict=True)]
            hints = {"delivered": [sums[name]]} if name == "randomk" else {}
            (expected,), remainders = reference.exchange([[array] for array in corrected], **hints)
            if name != "bf16":  # which has no error feedback
                residuals = [remainder for (remainder,) in remainders]
            apart = np.sort(np.abs(sums[name] - expected), axis=None)[:-2]
            found[name] = max(found[name], float(apart.max() / np.abs(expected).max()))
        last[name] = residuals
    return found, last
