"""Draws the life of a gradient on the replicas of the mirrored strategies."""

from pathlib import Path

from picture import Picture

ROOT = Path(__file__).resolve().parents[2]

STEPS: list[tuple[str, str, str]] = [
    # (what happens, where, kind)
    ("1. Part of the global batch", "training/replica_step.py", "user"),
    ("2. Loss, scaled by the replica's share of the samples", "keras_internals/losses.py", ""),
    ("3. Backpropagation: the last layer's gradient first", "Keras", ""),
    ("4. Accumulate micro-steps, divide by the loss scale", "updates/update_engine.py", ""),
    ("5. Pack gradients into buckets", "collectives/buckets.py", ""),
    ("6. Encode: gradient + residual → payload + new residual", "compression/", "core"),
]
AFTER: list[tuple[str, str, str]] = [
    ("8. Decode and sum: the same bits on every replica", "collectives/compressed_all_reduce.py", "core"),
    ("9. Finite? Clip, decay, apply, average", "Keras' optimizer", ""),
    ("10. The replica's copy of the variables is updated", "", "user"),
]


def gradient_life() -> Picture:
    """What happens to a gradient in a step of the mirrored strategies."""
    for _, where, _ in STEPS + AFTER:
        if "/" in where and not (ROOT / "tfdist" / where).exists():
            raise SystemExit(f"{__file__}: tfdist/{where} does not exist; correct STEPS or AFTER")
    width, left, right, box = 940, 20, 490, 430
    picture = Picture(width, 760, "The life of a gradient, from a batch to an update, on two replicas")
    picture.text(20, 28, "The life of a gradient", "title")
    picture.text(left + box / 2, 52, "replica 0", "name", "middle")
    picture.text(right + box / 2, 52, "replica 1 … N−1", "name", "middle")
    top, height, step = 64, 46, 62
    for x in (left, right):
        for number, (what, where, kind) in enumerate(STEPS):
            y = top + number * step
            picture.box(x, y, box, height, what, [f"@{where}"], kind)
            if number:
                picture.arrow([(x + box / 2, y - step + height), (x + box / 2, y)])
    wire = top + len(STEPS) * step
    picture.box(
        left,
        wire,
        width - 2 * left,
        height,
        "7. Exchange of payloads: all-reduce, all-gather, or all-to-all and all-gather",
        ["while backpropagation of earlier layers is still running; bytes are counted here"],
        "wire",
    )
    below = wire + step
    for x in (left, right):
        middle = x + box / 2
        picture.arrow([(middle, wire - step + height), (middle, wire)], "sent")
        picture.arrow([(middle, wire + height), (middle, below)], "sent")
        for number, (what, where, kind) in enumerate(AFTER):
            y = below + number * step
            picture.box(x, y, box, height, what, [f"@{where}"] if where else (), kind)
            if number:
                picture.arrow([(middle, y - step + height), (middle, y)])
    last = below + len(AFTER) * step
    picture.box(
        left,
        last,
        width - 2 * left,
        height,
        "11. After the step: metrics, logs and moving statistics, one collective per dtype",
        ["@training/metric_synchronization.py"],
        "wire",
    )
    for x in (left, right):
        picture.arrow([(x + box / 2, last - step + height), (x + box / 2, last)], "sent")
    return picture
