"""Lets pages link to files of the repository that are no pages: the site gets a copy of them.

On a forge `[job.yaml](../examples/kubernetes/job.yaml)` leads to that file. The site has no such neighbours, so each
file that a page links to is copied under `repository/`, and the link leads there. MkDocs calls these functions.
"""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

FOLDER = "repository"
_LINK = re.compile(r"(?P<before>\]\(|src=\")(?P<path>[^)\s#\"]+)")


def on_files(files: Any, config: Any) -> Any:
    """Adds every file outside of the pages' directory that a page links to."""
    root = Path(config.docs_dir).parent
    for page in list(files.documentation_pages()):
        text = Path(page.abs_src_path).read_text(encoding="utf-8")
        for path in {path for match in _LINK.finditer(text) if (path := _outside(match["path"], page, root))}:
            name = _name(path)
            if files.get_file_from_path(name) is None:
                files.append(File.generated(config, name, abs_src_path=str(root / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Makes links to those files lead to their copies."""
    root = Path(config.docs_dir).parent

    def inside(match: re.Match[str]) -> str:
        path = _outside(match["path"], page.file, root)
        if not path:
            return match[0]
        return match["before"] + os.path.relpath(_name(path), os.path.dirname(page.file.src_uri) or ".")

    return _LINK.sub(inside, markdown)


def _name(path: str) -> str:
    """Where the copy lies. The ending `.txt` makes a browser show what it would offer to save."""
    shown = (".png", ".svg", ".json", ".html", ".txt", ".ipynb")
    return f"{FOLDER}/{path}" if path.endswith(shown) else f"{FOLDER}/{path}.txt"


def _outside(link: str, file: Any, root: Path) -> str:
    """The path from the root of what a link leads to, if that is a file outside of the pages; else nothing."""
    if "://" in link or link.startswith(("/", "mailto:")) or file.abs_src_path is None:
        return ""
    target = Path(os.path.normpath(Path(file.abs_src_path).parent / link))
    pages = root / "docs"
    is_file = target.is_file() and target.is_relative_to(root) and not target.is_relative_to(pages)
    return target.relative_to(root).as_posix() if is_file else ""
