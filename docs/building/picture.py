"""A picture of boxes, arrows and text, as an SVG file that follows the reader's light or dark colours."""

from collections.abc import Sequence
from xml.sax.saxutils import escape

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
