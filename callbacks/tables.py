"""Tables as lines of text."""

from collections.abc import Sequence

_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))


def unit_of(largest_bytes: float) -> tuple[float, str]:
    """The unit in which numbers of bytes up to this one are told: its size in bytes, and its name.

    >>> unit_of(2500)
    (1000.0, 'kB')
    """
    return next((size, name) for size, name in _UNITS if largest_bytes >= size or size == 1)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table, the columns aligned, with rules below the first row and above the last.

    Args:
      rows: the cells: the head, the rows, and the total.
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]
    rule = "-" * len(lines[0])
    return [lines[0], rule, *lines[1:-1], rule, lines[-1]]
