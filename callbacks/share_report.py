"""What WorkerReport says about workers that share the rows of a batch: their shares, computation and waiting."""

from collections.abc import Sequence

from tfdist.load_balancing.row_shares import ShareStats
from tfdist.utils.formatting import table_with_total


def share_logs(done: Sequence[ShareStats]) -> dict[str, float]:
    """Returns the logs of an epoch.

    >>> sorted(share_logs([ShareStats(1.0, 2, 16, 0.25, 0.0)]))[:2]
    ['worker_0_compute_ms', 'worker_0_samples']
    """
    logs: dict[str, float] = {}
    for worker, stats in enumerate(done):
        values = {
            "share": stats.share,
            "samples": stats.samples,
            "compute_ms": _per_step(stats.seconds, stats.steps),
            "wait_ms": _per_step(stats.waited_seconds, stats.steps),
        }
        logs |= {f"worker_{worker}_{name}": float(value) for name, value in values.items()}
    return logs


def share_table(title: str, done: Sequence[ShareStats], seconds: float) -> list[str]:
    r"""Returns the lines of a table.

    >>> print("\n".join(share_table("Workers", [ShareStats(0.25, 2, 16, 0.1), ShareStats(0.75, 2, 48, 0.1)], 0.5)))
    Workers (2 steps in 0.5 s):
    worker  share  samples  samples/step  compute ms  wait ms
    ---------------------------------------------------------
    0        25 %       16           8.0        50.0      0.0
    1        75 %       48          24.0        50.0      0.0
    ---------------------------------------------------------
    total   100 %       64          32.0        50.0      0.0
    """

    def row(name: str, counts: Sequence[ShareStats]) -> list[str]:
        steps = counts[0].steps
        return [
            name,
            f"{100 * sum(count.share for count in counts):.0f} %",
            f"{sum(count.samples for count in counts):,}",
            f"{sum(count.samples for count in counts) / max(steps, 1):.1f}",
            f"{max(_per_step(count.seconds, steps) for count in counts):.1f}",
            f"{max(_per_step(count.waited_seconds, steps) for count in counts):.1f}",
        ]

    rows = [["worker", "share", "samples", "samples/step", "compute ms", "wait ms"]]
    rows += [row(str(worker), [stats]) for worker, stats in enumerate(done)]
    return [f"{title} ({done[0].steps:,} steps in {seconds:.1f} s):", *table_with_total([*rows, row("total", done)])]


def _per_step(seconds: float, steps: int) -> float:
    return 1e3 * seconds / max(steps, 1)
