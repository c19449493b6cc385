"""Lets pages link to files of the repository that are not pages, by copying them into the site.

On a forge `[job.yaml](../examples/kubernetes/job.yaml)` leads to that file. The site contains only pages, so each file
that a page links to is copied under `repository/`, and the link is changed to the copy. MkDocs calls these functions.
"""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

FOLDER = "repository"
_LINK = re.compile(r"(?P<before>\]\(|src=\")(?P<path>[^)\s#\"]+)")


def on_files(files: Any, config: Any) -> Any:
    """Adds every file outside of the directory of pages to which a page links."""
    root = Path(config.docs_dir).parent
    for page in list(files.documentation_pages()):
        text = Path(page.abs_src_path).read_text(encoding="utf-8")
        for path in {path for match in _LINK.finditer(text) if (path := _outside(match["path"], page, root))}:
            name = _name(path)
            if files.get_file_from_path(name) is None:
                files.append(File.generated(config, name, abs_src_path=str(root / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Changes links to these files into links to their copies."""
    root = Path(config.docs_dir).parent

    def inside(match: re.Match[str]) -> str:
        path = _outside(match["path"], page.file, root)
        if not path:
            return match[0]
        return match["before"] + os.path.relpath(_name(path), os.path.dirname(page.file.src_uri) or ".")

    return _LINK.sub(inside, markdown)


def _name(path: str) -> str:
    """The path of the copy. With the suffix `.txt` a browser shows a file that it would otherwise offer to save."""
    shown = (".png", ".svg", ".json", ".html", ".txt", ".ipynb")
    return f"{FOLDER}/{path}" if path.endswith(shown) else f"{FOLDER}/{path}.txt"


def _outside(link: str, file: Any, root: Path) -> str:
    """The target of a link relative to the root if it is a file outside of the pages, and "" otherwise."""
    if "://" in link or link.startswith(("/", "mailto:")) or file.abs_src_path is None:
        return ""
    target = Path(os.path.normpath(Path(file.abs_src_path).parent / link))
    pages = root / "docs"
    is_file = target.is_file() and target.is_relative_to(root) and not target.is_relative_to(pages)
    return target.relative_to(root).as_posix() if is_file else ""
