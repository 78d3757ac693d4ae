"""The findings of this package's checks: what is wrong, how serious it is, and what to do."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any


class Severity(Enum):
    """How serious a finding is."""

    ERROR = "error"  # it does not work
    WARNING = "warning"  # it works, at a cost that can be avoided
    NOTE = "note"  # good to know


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    name: str  # low cardinality: "memory-full"
    severity: Severity
    evidence: str  # the observation, with its numbers and units
    remedy: str  # what to do


def error(name: str, evidence: str, remedy: str) -> Finding:
    return Finding(name, Severity.ERROR, evidence, remedy)


def warning(name: str, evidence: str, remedy: str) -> Finding:
    return Finding(name, Severity.WARNING, evidence, remedy)


def note(name: str, evidence: str, remedy: str) -> Finding:
    return Finding(name, Severity.NOTE, evidence, remedy)


def plain(value: Any) -> Any:
    """For `json.dumps(default=plain)`: an enum's value, a dataclass as an object."""
    return value.value if isinstance(value, Enum) else asdict(value)
