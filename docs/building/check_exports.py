"""Everything that the public modules export is in `docs/api`, and everything in `docs/api` is exported."""

import importlib
import re
from collections.abc import Iterator

from page_files import Finding, Pages, line_at

MODULES = tuple(
    f"tfdist.{name}"
    for name in (
        "callbacks checkpoint cluster collectives compression data launch parameter_server spark strategies training"
    ).split()
)
# On the pages without an export: the entry point of the command, and the base class whose members both mirrored
# strategies have.
_NOT_EXPORTED = {"tfdist.launch.cli.main.main", "tfdist.strategies.replicated_strategy.ReplicatedStrategy"}
_DIRECTIVE = re.compile(r"^::: (\S+)$", re.MULTILINE)
_FOLDER = "docs/api/"


def exports(pages: Pages) -> Iterator[Finding]:
    """Exports that no page shows, and names on the pages that no module exports."""
    exported = {f"{name}.{export}" for name in MODULES for export in importlib.import_module(name).__all__}
    shown = set()
    for path, text in pages.markdown.items():
        for match in _DIRECTIVE.finditer(text if path.startswith(_FOLDER) else ""):
            # Pages also show docstrings of modules, and functions by the module of their name: `detect.detect`.
            name = re.sub(r"\.(\w+)\.\1$", r".\1", match[1])
            shown |= {name, match[1]}
            if name not in exported and match[1] not in {*_NOT_EXPORTED, *MODULES}:
                yield Finding(path, line_at(text, match.start()), f"no module exports {match[1]}")
    for name in sorted((exported | _NOT_EXPORTED) - shown):
        yield Finding(_FOLDER, 1, f"no page shows {name}. Expected: a line `::: {name}`, or no export")
