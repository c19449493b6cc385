"""The pictures of the documentation are those that their script draws, also of the present arrows between rooms."""

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]
PICTURES = sorted((ROOT / "docs" / "images").glob("*.svg"))


def test_committed_pictures_are_up_to_date() -> None:
    script = ROOT / "docs" / "building" / "pictures.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr} Run: python docs/building/pictures.py"


@pytest.mark.parametrize("file", PICTURES, ids=lambda file: file.name)
def test_elements_lie_inside_the_picture(file: Path) -> None:
    root = ElementTree.parse(file).getroot()
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for element in root.iter():
        if "x" in element.attrib:
            x, y = float(element.attrib["x"]), float(element.attrib["y"])
            right, bottom = x + float(element.get("width", 0)), y + float(element.get("height", 0))
            assert 0 <= x <= right <= width and 0 <= y <= bottom <= height, element.attrib


def test_there_are_four_pictures() -> None:
    assert [file.stem for file in PICTURES] == ["attempt_restart", "gradient_life", "rooms", "what_is_sent"]
