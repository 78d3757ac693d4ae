"""The findings of this package's checks: what is wrong, how serious it is, and what to do."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum
from functools import partial
from typing import Any


class Severity(Enum):
    ERROR = "error"  # it does not work
    WARNING = "warning"  # it works, at a cost that can be avoided
    NOTE = "note"  # good to know


@dataclass(frozen=True, slots=True)
class Finding:
    severity: Severity
    name: str  # low cardinality: "memory-full"
    evidence: str  # the observation, with its numbers and units
    remedy: str  # what to do


error = partial(Finding, Severity.ERROR)
warning = partial(Finding, Severity.WARNING)
note = partial(Finding, Severity.NOTE)


def plain(value: Any) -> Any:
    """For `json.dumps(default=plain)`: an enum's value, a dataclass as an object."""
    return value.value if isinstance(value, Enum) else asdict(value)


def counted(number: float, what: str) -> str:
    return f"{number:,.0f} {what}{'s' * (round(number) != 1)}"
