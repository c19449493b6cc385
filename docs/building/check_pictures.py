"""The pictures of the documentation are those that their script draws, and show all their elements."""

from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from page_files import Finding, Pages
from pictures import PICTURES

_FOLDER = "docs/images"


def pictures(pages: Pages) -> Iterator[Finding]:
    """Pictures that differ from what is drawn now, that nothing draws, or with elements beyond their borders."""
    folder = pages.root / _FOLDER
    for name, draw in PICTURES.items():
        file = folder / f"{name}.svg"
        if not file.is_file() or file.read_text(encoding="utf-8") != draw().svg():
            yield Finding(f"{_FOLDER}/{file.name}", 1, "differs. Run: python docs/building/pictures.py")
    for file in sorted(folder.glob("*.svg")):
        if file.stem not in PICTURES:
            yield Finding(f"{_FOLDER}/{file.name}", 1, "docs/building/pictures.py does not draw it")
        for element in _outside(file):
            yield Finding(f"{_FOLDER}/{file.name}", 1, f"lies outside of the picture: {element}")


def _outside(file: Path) -> Iterator[dict[str, str]]:
    root = ElementTree.parse(file).getroot()
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for element in root.iter():
        if "x" in element.attrib:
            x, y = float(element.attrib["x"]), float(element.attrib["y"])
            right, bottom = x + float(element.get("width", 0)), y + float(element.get("height", 0))
            if not (0 <= x <= right <= width and 0 <= y <= bottom <= height):
                yield dict(element.attrib)
