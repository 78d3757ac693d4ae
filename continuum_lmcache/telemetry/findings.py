"""What is wrong, how wrong, and what to do about it: the answer of every check of this package."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Severity(Enum):
    """How much a finding matters."""

    ERROR = "error"  # it does not work
    WARNING = "warning"  # it works, and costs something that can be had back
    NOTE = "note"  # good to know


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was found."""

    name: str  # low cardinality: "memory-full"
    severity: Severity
    figure: str  # what was seen, with its numbers and units
    remedy: str  # what to do


def error(name: str, figure: str, remedy: str) -> Finding:
    return Finding(name, Severity.ERROR, figure, remedy)


def warning(name: str, figure: str, remedy: str) -> Finding:
    return Finding(name, Severity.WARNING, figure, remedy)


def note(name: str, figure: str, remedy: str) -> Finding:
    return Finding(name, Severity.NOTE, figure, remedy)
