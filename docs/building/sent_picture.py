"""Draws what each strategy sends between which processes."""

from collections.abc import Sequence

from picture import Picture


def what_is_sent() -> Picture:
    """What each strategy sends between which processes."""
    picture = Picture(940, 760, "What each strategy sends between which processes in a training step")
    picture.text(20, 28, "What each strategy sends in a step", "title")
    picture.arrow([(420, 24), (455, 24)], "sent", both=True)
    picture.text(462, 28, "gradients", "small")
    picture.arrow([(545, 24), (580, 24)], "pulled")
    picture.text(587, 28, "variables", "small")
    picture.arrow([(670, 24), (705, 24)])
    picture.text(712, 28, "batches, results, “update now”", "small")
    _mirrored(picture, 20, 50)
    _multi_worker(picture, 480, 50)
    _servers(picture, 20, 395, "ParameterServerStrategy, Asynchronous()", asynchronous=True)
    _servers(picture, 480, 395, "ParameterServerStrategy, Synchronous()", asynchronous=False)
    return picture


def _panel(picture: Picture, x: float, y: float, height: float, title: str, notes: Sequence[str]) -> None:
    picture.frame(x, y, 440, height, "group")
    picture.text(x + 14, y + 24, title, "name")
    for number, note in enumerate(notes):
        picture.text(x + 14, y + height - 16 * (len(notes) - number) + 4, note, "small")


def _mirrored(picture: Picture, x: float, y: float) -> None:
    notes = [
        "One process. Each device computes on its rows, keeps a copy of the",
        "variables, and receives the sum of all gradients.",
    ]
    _panel(picture, x, y, 325, "MirroredStrategy", notes)
    picture.frame(x + 20, y + 44, 400, 185, "group")
    picture.text(x + 32, y + 62, "process", "small")
    for number in range(2):
        picture.box(
            x + 40 + number * 220, y + 90, 140, 70, f"device {number}", ["variables", "optimizer state"], "core"
        )
    picture.arrow([(x + 180, y + 125), (x + 260, y + 125)], "sent", both=True)
    picture.text(x + 220, y + 185, "gradients in buckets; then metrics and statistics", "small", "middle")
    picture.text(x + 220, y + 203, "through memory, or by NCCL between GPUs", "small", "middle")


def _multi_worker(picture: Picture, x: float, y: float) -> None:
    notes = [
        "One process per worker. Each worker receives the sum of all gradients;",
        "compression= makes the payloads smaller.",
    ]
    _panel(picture, x, y, 325, "MultiWorkerMirroredStrategy", notes)
    workers = [(x + 20, y + 50), (x + 280, y + 50), (x + 150, y + 185)]
    for number, (left, top) in enumerate(workers):
        name = "worker 0 (chief)" if number == 0 else f"worker {number}"
        picture.box(left, top, 140, 66, name, ["variables", "optimizer, residuals"], "core")
    picture.arrow([(x + 160, y + 83), (x + 280, y + 83)], "sent", both=True)
    picture.arrow([(x + 100, y + 116), (x + 175, y + 185)], "sent", both=True)
    picture.arrow([(x + 340, y + 116), (x + 265, y + 185)], "sent", both=True)
    picture.text(x + 220, y + 74, "payloads", "small", "middle")
    picture.text(x + 220, y + 140, "over the network", "small", "middle")


def _servers(picture: Picture, x: float, y: float, title: str, asynchronous: bool) -> None:
    if asynchronous:
        notes = [
            "Each worker pulls, computes and pushes independently; servers apply",
            "each push at once. Updates since the pull are its staleness.",
        ]
    else:
        notes = [
            "Each worker computes a part of the batch and writes its gradient to a",
            "buffer. When all parts are there, the servers apply them once.",
        ]
    _panel(picture, x, y, 345, title, notes)
    picture.box(x + 20, y + 125, 92, 70, "chief", ["runs fit", "draws data"], "user")
    for number in range(2):
        top = y + 60 + number * 130
        picture.box(x + 178, top, 92, 70, f"worker {number}", ["computes", "residuals"], "core")
        picture.arrow([(x + 112, y + 145 + number * 30), (x + 178, top + 35)], both=True)
    lines = ["variables", "optimizer"] if asynchronous else ["variables", "optimizer", "buffers"]
    picture.box(x + 338, y + 115, 92, 90, "servers", lines, "wire")
    for number in range(2):
        top = y + 60 + number * 130
        toward = y + 135 + number * 50
        picture.arrow([(x + 270, top + 24 + number * 22), (x + 338, toward - 8 + number * 16)], "sent")
        picture.arrow([(x + 338, toward + 6 - number * 12), (x + 270, top + 42 - number * 14)], "pulled")
    picture.text(x + 94, y + 112, "rows" if not asynchronous else "batches", "small", "middle")
    picture.text(x + 330, y + 84, "push" if asynchronous else "write a part", "small", "middle")
    if not asynchronous:
        picture.arrow([(x + 66, y + 195), (x + 66, y + 283), (x + 384, y + 283), (x + 384, y + 205)])
        picture.text(x + 225, y + 278, "“update now”", "small", "middle")
