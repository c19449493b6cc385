"""What a check has found."""

import dataclasses
from collections.abc import Iterable
from typing import Any

OK, WARNING, ERROR = LEVELS = ("ok", "warning", "error")
_MAX_CHARACTERS = 4000


@dataclasses.dataclass(frozen=True)
class Finding:
    """One finding.

    Args:
        level: `"ok"`, `"warning"` (a training may run, but look at it) or `"error"` (it will not run, or not as meant).
        check: The name of the check, the same in every version: `"open files"`.
        found: What was found, as a sentence or a few words.
        expected: What was expected instead; empty where all is well.
        remedy: What to do; empty where all is well.
        task: On which task's machine, for example `"worker 1"`; empty for a finding about all of them.

    >>> Finding("warning", "open files", "1024", "at least 4096", "ulimit -n 4096").to_json()["level"]
    'warning'
    """

    level: str
    check: str
    found: str
    expected: str = ""
    remedy: str = ""
    task: str = ""

    @classmethod
    def from_json(cls, document: object) -> "Finding":
        """Reads what another task has sent; nothing in it can move the cursor of a terminal.

        Raises:
            ValueError: If it is no finding.
        """
        if not isinstance(document, dict) or document.get("level") not in LEVELS:
            raise ValueError("no finding")
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: printable(document.get(name, "")) for name in names})

    def to_json(self) -> dict[str, Any]:
        """Returns it as a JSON object."""
        return dataclasses.asdict(self)

    def on(self, task: str) -> "Finding":
        """Returns the same, found on `task`."""
        return dataclasses.replace(self, task=task)


def worst_level(findings: Iterable[Finding]) -> str:
    """Returns the gravest level among the findings, `"ok"` for none.

    >>> worst_level([Finding("ok", "a", ""), Finding("warning", "b", "")])
    'warning'
    """
    return max((finding.level for finding in findings), key=LEVELS.index, default=OK)


def printable(text: object) -> str:
    r"""Returns a text without control characters, cut where it is very long.

    >>> printable("a\x1b[2Jb\nc")
    'a[2Jb c'
    """
    one_line = str(text)[:_MAX_CHARACTERS].replace("\n", " ")
    return "".join(filter(str.isprintable, one_line))
