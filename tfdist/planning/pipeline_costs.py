"""The time of a step in a pipeline of stages.

Sources: Huang et al. 2019, "GPipe"; Narayanan et al. 2021, "Efficient large-scale language model training on GPU
clusters using Megatron-LM", section 2.2: `P - 1` of `M + P - 1` slots are idle.
"""

from collections.abc import Sequence


def bubble(stages: int, micro_batches: int) -> float:
    """Returns the part of a step in which a stage waits.

    >>> bubble(1, 4), bubble(4, 4), bubble(4, 12)
    (0.0, 0.42857142857142855, 0.2)
    """
    return (stages - 1) / (micro_batches + stages - 1)


def pipeline_seconds(
    stage_seconds: Sequence[float],
    micro_batches: int,
    hop_seconds: float = 0.0,
    hop_link_seconds: float = 0.0,
    schedule: str = "1f1b",
) -> float:
    """Returns the time of the forward and backward passes of a step.

    The slowest stage, or the slowest link, is busy with all micro-batches; before its first and after its last one, the
    others compute one each, and activations and gradients pass every cut once. By 1F1B, stage `s` of `P` begins another
    micro-batch when the gradients of one of `P - s` have returned: on slow links stages wait for this.

    >>> pipeline_seconds([1.0, 1.0], 4), pipeline_seconds([1.0, 2.0], 4), pipeline_seconds([1.0, 1.0], 4, 0.5)
    (5.0, 9.0, 7.5)
    >>> pipeline_seconds([1.0, 1.0], 4, 0.5, schedule="gpipe")
    6.0
    >>> pipeline_seconds([1.0, 1.0], 4, 3.0, 3.0, schedule="gpipe")  # the link is slower than the stages
    17.0

    Args:
        stage_seconds: How long each stage computes a micro-batch, forward and backward.
        micro_batches: The number of micro-batches.
        hop_seconds: How long activations, or their gradients, take from a stage to the next one.
        hop_link_seconds: How long they occupy one direction of a link.
        schedule: "1f1b" or "gpipe".
    """
    pace = max(*stage_seconds, hop_link_seconds)
    stages = len(stage_seconds)
    for stage in range(stages if schedule == "1f1b" else 0):
        begun = stages - stage
        if micro_batches > begun:
            pace = max(pace, (sum(stage_seconds[stage:]) + 2 * (begun - 1) * hop_seconds) / begun)
    return sum(stage_seconds) + (micro_batches - 1) * pace + 2 * (stages - 1) * hop_seconds


def live_micro_batches(stage: int, stages: int, micro_batches: int, schedule: str) -> int:
    """Returns of how many micro-batches a stage holds activations at the same time.

    >>> [live_micro_batches(stage, 4, 8, "1f1b") for stage in range(4)], live_micro_batches(0, 4, 8, "gpipe")
    ([4, 3, 2, 1], 8)
    """
    return micro_batches if schedule == "gpipe" else min(stages - stage, micro_batches)
