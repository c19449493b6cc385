"""Draws an attempt that loses a worker, and its restart."""

from picture import Picture


def attempt_restart() -> Picture:
    """A lost worker, the restart, and what is restored."""
    picture = Picture(940, 480, "An attempt that loses a worker, and the restart that resumes from a checkpoint")
    picture.text(20, 28, "An attempt and its restart: tfdist run --workers 2 --max-restarts 3 train.py", "title")
    lanes = {"launcher": 100, "worker 0": 185, "worker 1": 270, "checkpoints": 360}
    for name, y in lanes.items():
        picture.text(20, y + 4, name, "name")
    picture.frame(118, 48, 372, 272, "group")
    picture.text(130, 67, "attempt 0", "small")
    picture.frame(548, 48, 372, 272, "group")
    picture.text(560, 67, "attempt 1", "small")
    first, second, store = lanes["worker 0"], lanes["worker 1"], lanes["checkpoints"]
    picture.box(126, 82, 66, 36, "start")
    picture.box(378, 82, 100, 36, "stop all", ["SIGTERM"])
    picture.box(556, 82, 66, 36, "start")
    picture.box(836, 82, 72, 36, "exit 0", kind="core")
    picture.arrow([(478, 100), (556, 100)])
    picture.text(519, 94, "back-off", "small", "middle")
    for y in (first, second):
        picture.box(146, y - 18, 118, 36, "steps 1 … 20", kind="core")
        picture.box(574, y - 18, 90, 36, "restore 20", kind="wire")
        picture.box(682, y - 18, 140, 36, "steps 21 … 100", kind="core")
        picture.arrow([(264, y), (282, y)])
        picture.arrow([(664, y), (682, y)])
    for left in (126, 556):
        picture.arrow([(left + 40, 118), (left + 40, first - 18)])
        picture.arrow([(left + 9, 118), (left + 9, second), (left + 20, second)])
    picture.arrow([(822, first), (862, first), (862, 118)])
    picture.arrow([(822, second), (886, second), (886, 118)])
    picture.box(282, first - 18, 146, 36, "steps 21 … 26", ["waits for worker 1"])
    picture.box(282, second - 18, 110, 36, "steps 21 … 26", kind="lost")
    picture.cross(405, second)
    picture.text(396, second + 24, "killed or frozen", "small")
    picture.arrow([(415, second), (462, second), (462, 118)], "fault")
    picture.arrow([(405, 118), (405, first - 18)], "fault")
    picture.box(190, store - 22, 150, 44, "ckpt-20", ["two shards, manifest"], "wire")
    picture.arrow([(220, second + 18), (220, store - 22)], "sent")
    picture.arrow([(273, first + 1), (273, store - 22)], "sent")
    picture.arrow([(340, store), (619, store), (619, second + 18)], "pulled")
    picture.text(479, store - 8, "complete: both workers restore it", "small", "middle")
    notes = [
        "A lost worker leaves the others waiting in a collective, so the launcher stops and restarts all.",
        "Steps 21 … 26 are lost and computed again: variables, optimizer, random state and position in the data are "
        "those of step 20,",
        "so that the weights after step 100 are bit-identical to a run without the loss.",
    ]
    for number, note in enumerate(notes):
        picture.text(20, 418 + 18 * number, note, "small")
    return picture
