"""Sort keys of a waiting turn, smallest first. Snapshots: none depends on the clock."""

from __future__ import annotations

from continuum_lmcache.types import QueueEntry

Order = tuple[float, ...]


def pinned_first(entry: QueueEntry) -> Order:
    """Continuum (arXiv 2511.02230 §4): preempted, then with a pin, then the time at which the program came,
    or after it had given its place up came to wait for another (docs/decisions/0009).

    The client's priority comes first if `honor_priority` is set; else it is 0 for all.
    """
    return (
        entry.priority,
        not entry.preempted,
        not entry.pinned,
        entry.program_since_s,
        entry.turn_arrival_s,
    )
