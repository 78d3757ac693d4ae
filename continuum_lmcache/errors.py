"""What can go wrong, and whose fault it is.

ContinuumError
├── ConfigError       a setting is unknown, malformed, or contradicts another
├── RequestError      one request carries a bad field; the others are fine
├── ProfileError      a measured profile is missing, malformed, or not is_plausible
├── GapsError         saved tool durations are not what their format says
├── TraceError        a trace file is not what its format says
├── ServerError       a running server does not answer, or not as vLLM does
└── InvariantError    this package's own books do not balance: a bug, please report
"""


class ContinuumError(Exception):
    """Any error this package raises on purpose."""


class ConfigError(ContinuumError, ValueError):
    """A setting is unknown, malformed, or contradicts another."""


class RequestError(ContinuumError, ValueError):
    """One request carries a bad field; it alone is refused (HTTP 400)."""


class ProfileError(ContinuumError, ValueError):
    """A measured profile is missing, malformed, or not is_plausible."""


class GapsError(ContinuumError, ValueError):
    """Saved tool durations are not what their format says."""


class TraceError(ContinuumError, ValueError):
    """A trace file is not what its format says."""


class ServerError(ContinuumError, RuntimeError):
    """A running server does not answer, or not as vLLM does."""


class InvariantError(ContinuumError, AssertionError):
    """The books do not balance. The message is the equation, with its numbers."""
