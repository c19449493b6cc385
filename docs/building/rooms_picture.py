"""Draws the rooms of tfdist and the arrows between them, from the table of imports that the tests check."""

import ast
from collections.abc import Iterable
from pathlib import Path

from picture import Picture, Point

IMPORT_TABLE = Path(__file__).resolve().parents[2] / "tests" / "support" / "architecture_rules.py"

# Rooms that are drawn without the arrows to them: nearly every room may import them.
COMMON = ("utils", "versions", "private_symbols", "patches", "strategy_hooks")
ROOMS: dict[str, tuple[float, float, str, str]] = {
    # room: (centre x, top y, what it holds, kind)
    "launch": (160, 120, "tfdist run, notebooks", "user"),
    "callbacks": (350, 120, "FailureRecovery, monitors", "user"),
    "strategies": (790, 120, "what replaces tf.distribute", "user"),
    "spark": (430, 38, "KerasEstimator", "user"),
    "doctor": (105, 225, "checks before a training", ""),
    "planning": (570, 120, "what a plan costs", ""),
    "tensor_parallel": (1030, 120, "layers split over devices", "core"),
    "elastic": (1290, 120, "steps as transactions", "core"),
    "membership": (1290, 310, "who trains together", "core"),
    "probe": (160, 48, "measures a program", ""),
    "recovery": (350, 225, "what a training consists of", "core"),
    "training": (545, 225, "a Keras step on replicas", "core"),
    "local_updates": (731, 225, "LocalSGD, DiLoCo", "core"),
    "parameter_server": (917, 225, "chief, workers, servers", "core"),
    "pipeline": (1103, 225, "stages on several devices", "core"),
    "host_storage": (296, 310, "disks, memory of hosts", "core"),
    "sharded_state": (474, 310, "split optimizer state", "core"),
    "updates": (650, 310, "the order of an update", "core"),
    "load_balancing": (835, 310, "rows by measured speed", "core"),
    "losses": (1020, 310, "means and sums of samples", "core"),
    "transport": (105, 395, "authenticated messages", ""),
    "exchange": (905, 500, "arrays between workers", "core"),
    "checkpoint": (315, 395, "the store of checkpoints", ""),
    "data_position": (492, 395, "position in the data", "core"),
    "collectives": (760, 395, "gradient exchange", "core"),
    "servers": (1005, 395, "TensorFlow's servers", ""),
    "data": (1090, 500, "Parquet, Spark, Dask, Ray", "user"),
    "cluster": (230, 500, "TF_CONFIG, Slurm, …", ""),
    "internals": (545, 500, "private symbols", ""),
    "compression": (720, 500, "how a gradient is encoded", "core"),
}
ROOM_WIDTH, ROOM_HEIGHT = 172, 52
# Arrows that would cross a box, as corners between start and end.
BENDS: dict[tuple[str, str], list[Point]] = {
    ("doctor", "cluster"): [(202, 377), (202, 470)],
    ("callbacks", "cluster"): [(240, 200), (199, 240), (199, 366), (216, 388), (216, 470)],
    ("host_storage", "exchange"): [(330, 384), (880, 384), (893, 470)],
    ("servers", "cluster"): [(960, 447), (960, 577), (230, 577), (230, 552)],
    ("data", "cluster"): [(1110, 552), (1110, 590), (200, 590), (200, 552)],
    ("data", "internals"): [(1070, 552), (1070, 564), (560, 564), (560, 552)],
    ("spark", "data"): [(490, 38), (490, 32), (1194, 32), (1194, 526), (1176, 526)],
    ("recovery", "data_position"): [(385, 303), (385, 371)],
    ("doctor", "checkpoint"): [(204, 318), (204, 376)],
    ("local_updates", "collectives"): [(742, 300), (742, 372)],
    ("load_balancing", "internals"): [(853, 378), (853, 468), (620, 476)],
    ("losses", "internals"): [(886, 384), (886, 478), (650, 482)],
    ("parameter_server", "servers"): [(931, 300), (931, 376)],
    ("launch", "probe"): [(130, 120), (130, 100)],
    ("probe", "strategies"): [(246, 92), (730, 121)],
    ("exchange", "transport"): [(905, 552), (905, 600), (60, 600), (60, 447)],
    ("strategies", "elastic"): [(850, 120), (850, 104), (1180, 104), (1180, 130), (1204, 130)],
    ("elastic", "recovery"): [(1240, 197), (420, 197)],
    ("elastic", "cluster"): [(1376, 146), (1388, 146), (1388, 612), (170, 612), (170, 552)],
    ("membership", "exchange"): [(1290, 470)],
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
    picture = Picture(1400, 670, "The rooms of tfdist and which may import which")
    picture.text(20, 28, "Rooms of tfdist: an arrow means “may import”", "title")
    picture.box(560, 48, 180, 40, "examples, benchmarks")
    for room, (x, y, holds, kind) in ROOMS.items():
        picture.box(x - ROOM_WIDTH / 2, y, ROOM_WIDTH, ROOM_HEIGHT, room, [holds], kind)
    for room, x in (("launch", 580), ("callbacks", 610), ("strategies", 700)):
        picture.arrow([(x, 88), (ROOMS[room][0], ROOMS[room][1])])
    outgoing = needed_arrows(arrows)
    for room, other in outgoing:
        picture.arrow(_between(room, other, outgoing))
    picture.text(
        20,
        632,
        "Blue: what users import or run. Green: what trains. Not drawn: arrows beside a longer path, and those to "
        "utils, versions and private_symbols.",
        "small",
    )
    names = "launch, doctor, planning, membership, exchange, transport, host_storage, checkpoint and cluster"
    without = f"{names} do not import TensorFlow."
    picture.text(20, 652, without, "small")
    return picture


def _between(room: str, other: str, arrows: Iterable[tuple[str, str]]) -> list[Point]:
    """The points of an arrow from the lower edge of a box to the upper edge of another; ends are spread on both."""

    def port(mine: str, position: int) -> float:
        ends = sorted(
            (pair for pair in arrows if pair[position] == mine), key=lambda pair: ROOMS[pair[1 - position]][0]
        )
        number = [pair[1 - position] for pair in ends].index(other if position == 0 else room)
        return ROOMS[mine][0] + (number - (len(ends) - 1) / 2) * 34

    if ROOMS[room][1] == ROOMS[other][1] and (room, other) not in BENDS:  # side by side
        middle, side = ROOMS[room][1] + ROOM_HEIGHT / 2, ROOM_WIDTH / 2
        side = side if ROOMS[room][0] < ROOMS[other][0] else -side
        return [(ROOMS[room][0] + side, middle), (ROOMS[other][0] - side, middle)]
    start = (port(room, 0), ROOMS[room][1] + ROOM_HEIGHT)
    end = (port(other, 1), ROOMS[other][1])
    bends = BENDS.get((room, other), [])
    if bends and bends[-1][1] > ROOMS[other][1]:  # it ends at the lower edge
        return bends
    return [start, *bends, end]
