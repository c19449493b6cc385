"""Draws the rooms of tfdist and the arrows between them, from the table of imports that the tests check."""

import ast
from collections.abc import Iterable
from pathlib import Path

from picture import Picture, Point

IMPORT_TABLE = Path(__file__).resolve().parents[2] / "tests" / "support" / "house_rules.py"

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
    "local_updates": (1050, 310, "LocalSGD, DiLoCo", "core"),
    "load_balancing": (470, 310, "rows by measured speed", "core"),
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
    ("load_balancing", "internals"): [(452, 378), (452, 463)],
    ("recovery", "data_position"): [(568, 300), (568, 380)],
    ("recovery", "checkpoint"): [(372, 300), (372, 380)],
}


def may_import() -> dict[str, set[str]]:
    """Reads from the architecture test which room may import which; sub-packages count as their package."""
    tree = ast.parse(IMPORT_TABLE.read_text(encoding="utf-8"))
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
