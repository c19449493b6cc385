"""Findings of the checks, and the report that collects them."""

import dataclasses
from typing import Any

import tfdist
from tfdist.doctor.check_context import CheckContext
from tfdist.doctor.compression_advice import Advice
from tfdist.doctor.link_measurement import LinkMeasurement
from tfdist.utils.formatting import printable

OK, WARNING, ERROR = LEVELS = ("ok", "warning", "error")

FORMAT = 1
"""Version of the JSON document. It changes if a key changes or is removed; new keys do not change it."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """Result of a check.

    Args:
        level: `"ok"`, `"warning"` (a training may run, but look at it) or `"error"` (a training fails, or does not run
            as intended).
        check: Name of the check, the same in every version, for example `"open files"`.
        found: What was found: a sentence or a few words.
        expected: What was expected; empty if the level is `"ok"`.
        remedy: What to do; empty if the level is `"ok"`.
        task: Task whose machine was checked, for example `"worker 1"`; empty for a finding about all tasks.

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
        """Reads what another task sent; control characters are removed.

        Raises:
            ValueError: If the document is malformed.
        """
        if not isinstance(document, dict) or document.get("level") not in LEVELS:
            raise ValueError("not a finding")
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: printable(document.get(name, "")) for name in names})

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON object."""
        return dataclasses.asdict(self)

    def on(self, task: str) -> "Finding":
        """Returns the same finding on `task`."""
        return dataclasses.replace(self, task=task)


@dataclasses.dataclass(frozen=True)
class Report:
    """Findings of all tasks.

    Args:
        context: What was checked.
        findings: The findings.
        hosts: Hostname of each task that has answered, this task first.
        links: Measured connections.
        advice: Suggestion for the measured network; None: nothing was measured.
    """

    context: CheckContext
    findings: tuple[Finding, ...]
    hosts: dict[str, str] = dataclasses.field(default_factory=dict)
    links: tuple[LinkMeasurement, ...] = ()
    advice: Advice | None = None

    @property
    def errors(self) -> int:
        """Number of errors."""
        return sum(finding.level == ERROR for finding in self.findings)

    @property
    def warnings(self) -> int:
        """Number of warnings."""
        return sum(finding.level == WARNING for finding in self.findings)

    @property
    def worst_level(self) -> str:
        """The most severe level of the findings."""
        return max((finding.level for finding in self.findings), key=LEVELS.index, default=OK)

    def to_json(self) -> dict[str, Any]:
        """Returns the document of `tfdist doctor --json`; `docs/doctor.md` describes it."""
        config = self.context.config
        cluster = None
        if config is not None:
            cluster = {
                "source": config.source,
                "task": self.context.task,
                "addresses": self.context.addresses,
                "hosts": self.hosts,
            }
        return {
            "format": FORMAT,
            "tfdist": tfdist.__version__,
            "verdict": self.worst_level,
            "errors": self.errors,
            "warnings": self.warnings,
            "cluster": cluster,
            "findings": [finding.to_json() for finding in self.findings],
            "links": [link.to_json() for link in self.links],
            "compression": None if self.advice is None else self.advice.to_json(),
        }
