"""Why a plan takes as long as it does, and what it costs in exactness, in words."""

from tfdist.planning.candidates import Candidate
from tfdist.planning.group_exchanges import exchange_of
from tfdist.planning.measurements import DENSE, Measurements
from tfdist.planning.pipeline_costs import bubble
from tfdist.utils.formatting import format_bytes, format_seconds

_BUSY = 0.6  # the part of a step from which something is what bounds it


def gradient_error(measured: Measurements, method: str, workers: int) -> float:
    """Returns by how much a first gradient of a method is off, as a part of the gradient."""
    return 0.0 if method == DENSE else exchange_of(measured.program, method, max(workers, 2)).gradient_error


def accuracy_of(measured: Measurements, one: Candidate) -> str:
    """Returns the price in exactness."""
    prices = []
    if one.method != DENSE:
        error = gradient_error(measured, one.method, one.workers)
        exchange = exchange_of(measured.program, one.method, max(one.workers, 2))
        prices.append(
            f"{_what_is_sent(one)} off by {100 * error:.2g} %"
            + (" at first; what is left out is added to the next ones" if exchange.state_bytes else "")
        )
    mode = one.strategy.arguments.get("mode")
    if one.accumulated > 1:
        prices.append(f"an update for {one.accumulated} batches, as if batches were {one.accumulated} times as large")
    elif one.strategy.name == "ParameterServerStrategy" and one.is_local:
        prices.append(f"gradients are up to about {one.workers - 1} updates old, and each run differs")
    elif isinstance(mode, dict) and "sync_every" in mode["arguments"]:
        prices.append(f"workers train apart for {mode['arguments']['sync_every']} updates, on their own parts")
    return "; ".join(prices) or "exact: the numbers of one process, up to rounding"


def reason_of(measured: Measurements, one: Candidate, dense_bytes: float) -> str:
    """Returns what bounds the step, and what the plan does about it."""
    predicted = one.prediction
    step = predicted.step_seconds
    if one.workers == 1:
        return f"one worker computes {format_seconds(predicted.compute_seconds)} and sends nothing"
    if predicted.link_seconds > _BUSY * step:
        bound = f"the link is busy {_of(predicted.link_seconds, step)}"
    elif predicted.compute_seconds > _BUSY * step:
        bound = f"computation takes {_of(predicted.compute_seconds, step)}"
    elif predicted.exchange_seconds > max(predicted.compute_seconds, predicted.link_seconds):
        bound = f"encoding and copies take the cores {_of(predicted.exchange_seconds, step)}"
    else:
        bound = (
            f"of {format_seconds(step)} computation takes {format_seconds(predicted.compute_seconds)}, the exchange "
            f"{format_seconds(predicted.exchange_seconds)} of the cores and {format_seconds(predicted.link_seconds)} "
            "of the link; the rest are latencies"
        )
    means = _means(one, dense_bytes)
    return f"{bound}; {means}" if means else bound


def _means(one: Candidate, dense_bytes: float) -> str:
    """What the plan changes."""
    arguments, predicted = one.strategy.arguments, one.prediction
    means = []
    if one.strategy.name == "ModelParallelStrategy":
        pipeline = arguments["pipeline"]["arguments"]
        stages, parts = pipeline["stages"], pipeline["micro_batches"]
        if stages > 1:
            means.append(f"stages wait {100 * bubble(stages, parts):.0f} % of it for others")
        if "layout_map" in arguments:
            means.append("layers are split, as far as auto_layout can")
    elif one.strategy.name == "ParameterServerStrategy":
        means.append(f"each worker pulls all weights, and sends {format_bytes(predicted.wire_bytes)}")
    if one.method != DENSE or one.is_local or "shard_optimizer_state" in arguments:
        if 0 < predicted.wire_bytes < dense_bytes:
            means.append(f"sends {_part(dense_bytes / predicted.wire_bytes)} of the dense gradients")
    if "shard_optimizer_state" in arguments:
        means.append(f"a worker holds 1/{one.workers} of the slots")
    if arguments.get("micro_batches", 1) > 1:
        means.append(f"activations of 1/{arguments['micro_batches']} of the rows at a time")
    if "bucket_bytes" in arguments:
        means.append("one message instead of one for each bucket")
    if "load_balancing" in arguments:
        means.append("rows follow the speeds of the workers")
    if one.compiled:
        means.append("XLA compiles the layers")
    return "; ".join(means)


def _what_is_sent(one: Candidate) -> str:
    is_difference = one.is_local and one.strategy.name == "MultiWorkerMirroredStrategy" and one.accumulated == 1
    return "differences of weights are" if is_difference else "gradients are"


def _of(part: float, step: float) -> str:
    return f"{format_seconds(min(part, step))} of {format_seconds(step)}"


def _part(ratio: float) -> str:
    return f"1/{ratio:.1f}" if ratio < 10 else f"1/{ratio:.0f}"
