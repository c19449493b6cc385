"""Strips the notebooks to the committed form: no outputs, and the same metadata in each.

python tests/notebooks/notebook_files.py    strips examples/notebooks/*.ipynb
"""

import sys
from pathlib import Path

import nbformat

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "notebooks"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def paths() -> list[Path]:
    return sorted(FOLDER.glob("*.ipynb"))


def stripped(text: str) -> str:
    """Returns the text of a notebook without outputs, counts and metadata. Raises if the notebook is invalid."""
    notebook = nbformat.reads(text, as_version=4)
    notebook.metadata = nbformat.from_dict(METADATA)
    notebook.nbformat_minor = 5
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({})
        cell.pop("attachments", None)
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    nbformat.validate(notebook)
    return nbformat.writes(notebook) + "\n"


def main() -> None:
    for path in paths():
        text = path.read_text(encoding="utf-8")
        if stripped(text) != text:
            path.write_text(stripped(text), encoding="utf-8")
            sys.stdout.write(f"stripped {path.relative_to(FOLDER.parents[1])}\n")


if __name__ == "__main__":
    main()
