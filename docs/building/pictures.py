"""Draws the pictures of the documentation as SVG files.

    python docs/building/pictures.py          writes docs/images/*.svg
    python docs/building/pictures.py --check  exits with 1 if a file differs

`make docs` runs it. Uses the standard library only, and the same input gives the same bytes. Each picture draws its
background, and follows the reader's preference for light or dark colours.
"""

import argparse
import ast
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "docs" / "images"
ARCHITECTURE_TEST = ROOT / "tests" / "test_architecture.py"

Point = tuple[float, float]

STYLE = """
  .page { fill: #ffffff; stroke: #d0d7de; }
  text { font: 13px -apple-system, "Segoe UI", Roboto, "DejaVu Sans", Arial, sans-serif; fill: #1f2328; }
  .title { font-size: 15px; font-weight: 600; }
  .name { font-weight: 600; }
  .small { font-size: 11.5px; fill: #57606a; }
  .file { font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; font-size: 11px; fill: #57606a; }
  .box { stroke: #57606a; stroke-width: 1.2; fill: #f6f8fa; }
  .user { fill: #ddf4ff; stroke: #0969da; }
  .core { fill: #dafbe1; stroke: #1a7f37; }
  .wire { fill: #fff8c5; stroke: #9a6700; }
  .lost { fill: #ffebe9; stroke: #cf222e; }
  .group { fill: none; stroke: #8c959f; stroke-dasharray: 5 4; }
  .arrow { fill: none; stroke: #57606a; stroke-width: 1.4; }
  .sent { fill: none; stroke: #9a6700; stroke-width: 2; }
  .pulled { fill: none; stroke: #0969da; stroke-width: 2; }
  .fault { fill: none; stroke: #cf222e; stroke-width: 2; }
  .head { fill: #57606a; } .sent-head { fill: #9a6700; } .pulled-head { fill: #0969da; } .fault-head { fill: #cf222e; }
  @media (prefers-color-scheme: dark) {
    .page { fill: #161b22; stroke: #30363d; }
    text { fill: #e6edf3; }
    .small, .file { fill: #a3adb8; }
    .box { fill: #21262d; stroke: #8b949e; }
    .user { fill: #0c2d6b; stroke: #58a6ff; }
    .core { fill: #0f3d1f; stroke: #3fb950; }
    .wire { fill: #4b3200; stroke: #d29922; }
    .lost { fill: #5c1414; stroke: #ff7b72; }
    .group { stroke: #6e7681; }
    .arrow { stroke: #a3adb8; } .sent { stroke: #d29922; } .pulled { stroke: #58a6ff; } .fault { stroke: #ff7b72; }
    .head { fill: #a3adb8; } .sent-head { fill: #d29922; }
    .pulled-head { fill: #58a6ff; } .fault-head { fill: #ff7b72; }
  }"""
HEADS = {"arrow": "head", "sent": "sent-head", "pulled": "pulled-head", "fault": "fault-head"}


class Picture:
    """Collects the elements of an SVG file."""

    def __init__(self, width: int, height: int, title: str) -> None:
        """Starts a picture of so many pixels; `title` describes it to readers who cannot see it."""
        self.size = width, height
        self._title = title
        self._elements: list[str] = []

    def box(
        self, x: float, y: float, width: float, height: float, name: str, lines: Sequence[str] = (), kind: str = ""
    ) -> None:
        """Draws a box with its top left corner at (x, y). A line that starts with "@" names a file."""
        self.frame(x, y, width, height, f"box {kind}".strip())
        step, middle = 16, x + width / 2
        top = y + height / 2 - step * len(lines) / 2 + 4.5
        self.text(middle, top, name, "name", "middle")
        for number, line in enumerate(lines, 1):
            self.text(middle, top + number * step, line.lstrip("@"), "file" if line[0] == "@" else "small", "middle")

    def frame(self, x: float, y: float, width: float, height: float, kind: str) -> None:
        """Draws a rectangle with rounded corners."""
        self._elements.append(
            f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6"/>'
        )

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        """Writes a line of text."""
        attributes = f' class="{kind}"' if kind else ""
        self._elements.append(f'<text{attributes} x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>')

    def arrow(self, points: Sequence[Point], kind: str = "arrow", both: bool = False, dashed: bool = False) -> None:
        """Draws an arrow along `points`; `both` gives it a head at each end."""
        path = " L ".join(f"{x:g} {y:g}" for x, y in points)
        head = f"url(#{HEADS[kind]})"
        start = f' marker-start="{head}"' if both else ""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._elements.append(f'<path class="{kind}" d="M {path}"{start} marker-end="{head}"{dash}/>')

    def cross(self, x: float, y: float, size: float = 7) -> None:
        """Draws a cross, the sign of a killed process."""
        self._elements.append(
            f'<path class="fault" d="M {x - size:g} {y - size:g} L {x + size:g} {y + size:g} '
            f'M {x - size:g} {y + size:g} L {x + size:g} {y - size:g}"/>'
        )

    def svg(self) -> str:
        """Returns the file's content."""
        width, height = self.size
        markers = "\n".join(
            f'<marker id="{head}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" '
            f'markerUnits="userSpaceOnUse" orient="auto-start-reverse"><path class="{head}" d="M 0 0 L 10 5 L 0 10 z"/>'
            "</marker>"
            for head in HEADS.values()
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" role="img">\n<title>{escape(self._title)}</title>\n'
            f"<style>{STYLE}\n</style>\n<defs>\n{markers}\n</defs>\n"
            f'<rect class="page" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>\n'
            + "\n".join(self._elements)
            + "\n</svg>\n"
        )


# The rooms.

# Rooms that are drawn without the arrows to them: nearly every room may import them.
COMMON = ("utils", "versions", "private_symbols")
ROOMS: dict[str, tuple[float, float, str, str]] = {
    # room: (centre x, top y, what it holds, kind)
    "launch": (160, 120, "tfdist run, notebooks", "user"),
    "callbacks": (430, 120, "FailureRecovery, monitors", "user"),
    "strategies": (740, 120, "what replaces tf.distribute", "user"),
    "doctor": (115, 225, "checks before a training", ""),
    "recovery": (430, 225, "what a training consists of", "core"),
    "training": (665, 225, "a Keras step on replicas", "core"),
    "parameter_server": (890, 225, "chief, workers, servers", "core"),
    "model_parallel": (1090, 225, "stages on several devices", "core"),
    "sharded_state": (665, 310, "split optimizer state", "core"),
    "transport": (105, 395, "authenticated messages", ""),
    "checkpoint": (360, 395, "the store of checkpoints", ""),
    "data_position": (545, 395, "position in the data", "core"),
    "collectives": (735, 395, "gradient exchange", "core"),
    "servers": (940, 395, "TensorFlow's servers", ""),
    "cluster": (230, 500, "TF_CONFIG, Slurm, …", ""),
    "internals": (545, 500, "private symbols", ""),
    "compression": (820, 500, "how a gradient is encoded", "core"),
}
ROOM_WIDTH, ROOM_HEIGHT = 172, 52
# Arrows that would cross a box, as corners between start and end.
BENDS: dict[tuple[str, str], list[Point]] = {
    ("doctor", "cluster"): [(204, 377), (204, 470)],
    ("callbacks", "cluster"): [(305, 200), (252, 375)],
    ("servers", "cluster"): [(965, 447), (965, 577), (230, 577), (230, 552)],
    ("model_parallel", "internals"): [(1090, 277), (1090, 591), (545, 591), (545, 552)],
    ("parameter_server", "internals"): [(833, 330), (833, 463)],
}


def may_import() -> dict[str, set[str]]:
    """Reads from the architecture test which room may import which; sub-packages count as their package."""
    tree = ast.parse(ARCHITECTURE_TEST.read_text(encoding="utf-8"))
    values: dict[str, object] = {"frozenset": frozenset}
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id in ("PUBLIC", "MAY_IMPORT"):
            values[target.id] = eval(compile(ast.Expression(node.value), "table", "eval"), values)  # type: ignore[attr-defined]
    found: dict[str, set[str]] = {}
    for room, others in values["MAY_IMPORT"].items():  # type: ignore[attr-defined]
        package = room.partition("/")[0]
        found.setdefault(package, set()).update({other.partition("/")[0] for other in others} - {package})
    return found


def needed_arrows(arrows: dict[str, set[str]]) -> list[tuple[str, str]]:
    """The arrows that no longer path stands for, sorted."""

    def reaches(room: str, target: str) -> bool:
        return target in arrows[room] or any(reaches(other, target) for other in arrows[room])

    return sorted(
        (room, other)
        for room, others in arrows.items()
        for other in others
        if not any(reaches(third, other) for third in others - {other})
    )


def rooms() -> Picture:
    """The rooms and their arrows."""
    table = may_import()
    unknown = set(table) - set(ROOMS) - set(COMMON) - {"tfdist", "examples", "benchmarks"}
    if unknown:
        raise SystemExit(f"{__file__}: give these rooms a place in ROOMS: {sorted(unknown)}")
    arrows = {room: others - set(COMMON) for room, others in table.items() if room in ROOMS}
    picture = Picture(1200, 655, "The rooms of tfdist and which may import which")
    picture.text(20, 28, "Rooms of tfdist: an arrow means “may import”", "title")
    picture.box(340, 48, 180, 40, "examples, benchmarks")
    for room, (x, y, holds, kind) in ROOMS.items():
        picture.box(x - ROOM_WIDTH / 2, y, ROOM_WIDTH, ROOM_HEIGHT, room, [holds], kind)
    for room, x in (("launch", 360), ("callbacks", 430), ("strategies", 500)):
        picture.arrow([(x, 88), (ROOMS[room][0], ROOMS[room][1])])
    outgoing = needed_arrows(arrows)
    for room, other in outgoing:
        picture.arrow(_between(room, other, outgoing))
    picture.text(
        20,
        610,
        "Blue: what users import or run. Green: what trains. Not drawn: arrows beside a longer path, and those to "
        "utils, versions and private_symbols.",
        "small",
    )
    picture.text(20, 630, "launch, doctor, transport, checkpoint and cluster do not import TensorFlow.", "small")
    return picture


def _between(room: str, other: str, arrows: Iterable[tuple[str, str]]) -> list[Point]:
    """The points of an arrow from the lower edge of a box to the upper edge of another; ends are spread on both."""

    def port(mine: str, position: int) -> float:
        ends = sorted(
            (pair for pair in arrows if pair[position] == mine), key=lambda pair: ROOMS[pair[1 - position]][0]
        )
        number = [pair[1 - position] for pair in ends].index(other if position == 0 else room)
        return ROOMS[mine][0] + (number - (len(ends) - 1) / 2) * 34

    if ROOMS[room][1] == ROOMS[other][1]:  # side by side
        middle = ROOMS[room][1] + ROOM_HEIGHT / 2
        return [(ROOMS[room][0] + ROOM_WIDTH / 2, middle), (ROOMS[other][0] - ROOM_WIDTH / 2, middle)]
    start = (port(room, 0), ROOMS[room][1] + ROOM_HEIGHT)
    end = (port(other, 1), ROOMS[other][1])
    bends = BENDS.get((room, other), [])
    if bends and bends[-1][1] > ROOMS[other][1]:  # it ends at the lower edge
        return bends
    return [start, *bends, end]


# The life of a gradient.

STEPS: list[tuple[str, str, str]] = [
    # (what happens, where, kind)
    ("1. Part of the global batch", "training/replica_step.py", "user"),
    ("2. Loss, scaled by the replica's share of the samples", "keras_internals/losses.py", ""),
    ("3. Backpropagation: the last layer's gradient first", "Keras", ""),
    ("4. Accumulate micro-steps, divide by the loss scale", "training/optimizer_update.py", ""),
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


# What each strategy sends where.


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


# An attempt and its restart.


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


PICTURES: dict[str, Callable[[], Picture]] = {
    "rooms": rooms,
    "gradient_life": gradient_life,
    "what_is_sent": what_is_sent,
    "attempt_restart": attempt_restart,
}


def main() -> int:
    """Writes the pictures, or checks them; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file differs")
    check = parser.parse_args().check
    stale = []
    for name, draw in PICTURES.items():
        file, text = IMAGES / f"{name}.svg", draw().svg()
        if not file.is_file() or file.read_text(encoding="utf-8") != text:
            stale.append(str(file.relative_to(ROOT)))
            if not check:
                file.write_text(text, encoding="utf-8")
    if stale:
        sys.stdout.write(f"{'differs' if check else 'written'}: {', '.join(stale)}\n")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
