"""All that was found, as one document."""

import dataclasses
from typing import Any

import tfdist
from tfdist.doctor.advice import Advice
from tfdist.doctor.finding import ERROR, OK, WARNING, Finding, worst_level
from tfdist.doctor.link import Link
from tfdist.doctor.situation import Situation

FORMAT = 1
"""Changes when a name in the JSON document changes or goes; new names may come without."""


@dataclasses.dataclass(frozen=True)
class Report:
    """What was found.

    Args:
        situation: What was looked at.
        findings: All of them, of all tasks.
        hosts: The machine's name by task, of those that have answered, this one first.
        links: What was measured.
        advice: What that suggests, or None where nothing was measured.
    """

    situation: Situation
    findings: tuple[Finding, ...]
    hosts: dict[str, str] = dataclasses.field(default_factory=dict)
    links: tuple[Link, ...] = ()
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
    def verdict(self) -> str:
        """The gravest level found."""
        return worst_level(self.findings) if self.findings else OK

    def to_json(self) -> dict[str, Any]:
        """Returns the document of `tfdist doctor --json`; `docs/doctor.md` describes it."""
        config = self.situation.config
        return {
            "format": FORMAT,
            "tfdist": tfdist.__version__,
            "verdict": self.verdict,
            "errors": self.errors,
            "warnings": self.warnings,
            "cluster": None
            if config is None
            else {
                "source": config.source,
                "task": self.situation.task,
                "addresses": self.situation.addresses,
                "hosts": self.hosts,
            },
            "findings": [finding.to_json() for finding in self.findings],
            "links": [link.to_json() for link in self.links],
            "compression": None if self.advice is None else self.advice.to_json(),
        }
