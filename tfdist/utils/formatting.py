"""Formats bytes, rates, counts, durations, signals and tables as text."""

import signal
from collections.abc import Collection, Sequence

_BYTE_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))
_MAX_CHARACTERS = 4000


def format_bytes(count: float) -> str:
    """Formats a number of bytes.

    >>> format_bytes(999), format_bytes(50_123_456)
    ('999 B', '50.1 MB')
    """
    return _scaled(count, "B")


def byte_unit(largest: float) -> tuple[float, str]:
    """Returns the unit for a column of byte counts by the largest of them: its size in bytes and its name.

    >>> byte_unit(2500)
    (1000.0, 'kB')
    """
    return next((size, name) for size, name in _BYTE_UNITS if largest >= size or size == 1)


def format_rate(bytes_per_second: float) -> str:
    """Formats a bandwidth in bits per second.

    >>> format_rate(12_500_000)
    '100.0 Mbit/s'
    """
    return _scaled(8 * bytes_per_second, "bit/s")


def format_count(count: int) -> str:
    """Formats a number of parameters.

    >>> format_count(10_000_000), format_count(1_500_000_000), format_count(12)
    ('10M', '1.5G', '12')
    """
    for size, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun.

    >>> counted(1, "worker"), counted(2, "worker")
    ('1 worker', '2 workers')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def signal_name(number: int) -> str:
    """Returns the name of a signal, for example `"SIGTERM"`.

    >>> signal_name(15), signal_name(200)
    ('SIGTERM', 'signal 200')
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def format_seconds(seconds: float) -> str:
    """Formats a measured time with three significant digits below a second.

    >>> format_seconds(0.00002), format_seconds(0.0021), format_seconds(0.4), format_seconds(12.3)
    ('20 µs', '2.10 ms', '400 ms', '12.3 s')
    """
    if seconds >= 1:
        return f"{seconds:.1f} s"
    milliseconds = 1000 * seconds
    if milliseconds < 1:
        return f"{1000 * milliseconds:.0f} µs"
    return f"{milliseconds:.{0 if milliseconds >= 100 else 1 if milliseconds >= 10 else 2}f} ms"


def format_duration(seconds: float) -> str:
    """Formats a run time or an age in its largest units; a negative one counts as 0.

    >>> format_duration(12.7), format_duration(125), format_duration(7300), format_duration(200_000)
    ('12 s', '2 min', '2 h 1 min', '2 d 7 h')
    """
    whole = max(0, int(seconds))
    minutes, hours = whole // 60, whole // 3600
    if whole < 120:
        return f"{whole} s"
    if minutes < 120:
        return f"{minutes} min"
    return f"{hours} h {minutes % 60} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def short_device(name: str) -> str:
    """Shortens the full name of a device.

    >>> short_device("/job:localhost/replica:0/task:0/device:CPU:1")
    'CPU:1'
    >>> short_device("/job:worker/replica:0/task:2/device:GPU:0")
    'worker:2/GPU:0'
    """
    parts = dict(part.split(":", 1) for part in name.strip("/").split("/"))
    task = "" if parts.get("job", "localhost") == "localhost" else f"{parts['job']}:{parts['task']}/"
    return task + parts["device"]


def align_columns(rows: Sequence[Sequence[str]], *, left: Collection[int] = (0,)) -> list[str]:
    """Returns the rows as lines with aligned columns, those at the indices `left` to the left, the others to the right.

    >>> align_columns([["method", "bytes"], ["bf16", "12"]])
    ['method  bytes', 'bf16       12']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def table_with_total(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a table with rules below the headings, the first row, and above the total, the last one."""
    head, *body, total = align_columns(rows)
    rule = "-" * max(map(len, (head, *body, total)))
    return [head, rule, *body, rule, total]


def printable(text: object) -> str:
    r"""Returns a text in one line, without control characters, cut after 4000 characters.

    >>> printable("a\x1b[2Jb\nc")
    'a[2Jb c'
    """
    one_line = str(text)[:_MAX_CHARACTERS].replace("\n", " ")
    return "".join(filter(str.isprintable, one_line))


def _scaled(amount: float, unit: str) -> str:
    prefix = ""
    for prefix in ("", "k", "M", "G", "T"):
        if amount < 999.95 or prefix == "T":
            break
        amount /= 1000
    return f"{amount:.0f} {unit}" if not prefix else f"{amount:.1f} {prefix}{unit}"
