"""Draws the pictures of the documentation as SVG files.

    python docs/building/pictures.py          writes docs/images/*.svg
    python docs/building/pictures.py --check  exits with 1 if a file differs

`make docs` runs it. Uses the standard library only, and the same input gives the same bytes. Each picture draws its
background, and follows the reader's preference for light or dark colours.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from gradient_picture import gradient_life
from picture import Picture
from restart_picture import attempt_restart
from rooms_picture import rooms
from sent_picture import what_is_sent

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "docs" / "images"

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
