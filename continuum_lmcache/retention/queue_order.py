"""Sort keys of a waiting turn, smallest first. Snapshots: none depends on the clock."""

from __future__ import annotations

from continuum_lmcache.types import QueueEntry

LONGEST_WAIT_S = 120.0  # in the queue, while later turns go first

Order = tuple[float, ...]


def pinned_first(entry: QueueEntry) -> Order:
    """Continuum (arXiv 2511.02230 §4): preempted, then with a pin, then program arrival. Where started
    programs take turns on the GPU, the turn's own arrival (docs/decisions/0009). A turn that has waited for
    LONGEST_WAIT_S goes before all later ones.

    The client's priority comes first if `honor_priority` is set; else it is 0 for all.
    """
    return (
        entry.priority,
        not entry.preempted,
        entry.overdue_s,
        not entry.pinned,
        entry.queued_since_s,
        entry.turn_arrival_s,
    )
