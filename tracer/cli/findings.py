"""What a run found to know about its server and itself, on standard error."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvwitness.tracer.cli.output import note
from kvwitness.tracer.protocol.fit import Finding, Severity

_WORD: Final = {Severity.STOP: "error", Severity.WARN: "warning"}


def note_findings(findings: Iterable[Finding]) -> None:
    """One line each."""
    for finding in findings:
        note(f"{_WORD[finding.severity]}: {finding.message}")
