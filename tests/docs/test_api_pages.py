"""Everything that the public modules export is in `docs/api`, and everything in `docs/api` is exported."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PUBLIC_MODULES = tuple(
    f"tfdist.{name}"
    for name in (
        "callbacks checkpoint cluster collectives compression data launch parameter_server spark strategies training"
    ).split()
)
# On the pages without an export: the entry point of the command, and the base class whose members both mirrored
# strategies have.
NOT_EXPORTED = {"tfdist.launch.cli.main.main", "tfdist.strategies.replicated_strategy.ReplicatedStrategy"}
DIRECTIVE = re.compile(r"^::: (\S+)$", re.MULTILINE)

pytestmark = pytest.mark.usefixtures("cpus")


def documented() -> set[str]:
    return {name for page in (ROOT / "docs" / "api").glob("*.md") for name in DIRECTIVE.findall(page.read_text())}


def exported() -> set[str]:
    names = {module: importlib.import_module(module).__all__ for module in PUBLIC_MODULES}
    return {f"{module}.{name}" for module, exports in names.items() for name in exports}


def differences(documented: set[str], exported: set[str]) -> tuple[set[str], set[str]]:
    """The exports that no page shows, and the names on the pages that no module exports."""
    # Pages may also show a module's docstring, and a function by the module of its name, as `cluster.detect.detect`.
    names = documented - NOT_EXPORTED - set(PUBLIC_MODULES)
    shown = {re.sub(r"\.(\w+)\.\1$", r".\1", name) for name in names}
    return exported - shown, shown - exported


def test_exports_and_pages_agree() -> None:
    undocumented, unexported = differences(documented(), exported())
    assert not undocumented, f"Add `::: name` to a page of docs/api, or do not export it: {undocumented}"
    assert not unexported, f"Add it to `__all__` of its module, or remove it from docs/api: {unexported}"


def test_every_exception_is_on_a_page() -> None:
    assert NOT_EXPORTED <= documented()


def test_what_is_on_one_side_only_is_found() -> None:
    names = {"tfdist.a.B", "tfdist.a.detect"}
    assert differences({"tfdist.a.B", "tfdist.a.detect.detect", "tfdist.cluster"}, names) == (set(), set())
    assert differences({"tfdist.a.B"}, names) == ({"tfdist.a.detect"}, set())
    assert differences(names | {"tfdist.a.Gone"}, names) == (set(), {"tfdist.a.Gone"})
