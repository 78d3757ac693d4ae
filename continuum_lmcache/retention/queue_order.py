"""Sort keys of a waiting turn, smallest first. Snapshots: none depends on the clock."""

from __future__ import annotations

from continuum_lmcache.types import QueueEntry

PLAS_QUANTUM_TOKENS = 2048  # the first queue's width: one prefill step of vLLM's default budget
PLAS_AGEING_S = 30.0  # a wait of this length makes up for one queue
LONGEST_WAIT_S = 120.0  # in the queue, while later turns go first

Order = tuple[float, ...]


def request_fcfs(entry: QueueEntry) -> Order:
    """vLLM's fcfs: preempted turns at the front, then by arrival. It ignores the client's priority."""
    return (not entry.preempted, entry.turn_arrival_s)


def program_fcfs(entry: QueueEntry) -> Order:
    """A program keeps its place across its turns; the client's priority comes first."""
    return (
        entry.priority,
        not entry.preempted,
        entry.program_arrival_s,
        entry.turn_arrival_s,
    )


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
        entry.place_s,
        entry.turn_arrival_s,
    )


def least_attained_service(entry: QueueEntry) -> Order:
    """Autellix's PLAS (arXiv 2502.13965): the program with the least service goes first.

    Queues double in width: queue 0 up to PLAS_QUANTUM_TOKENS of service, queue 1 up to twice that,
    and so on; arrival decides within one. Autellix moves a turn to the first queue once its
    program's waiting is a multiple of its service. That needs a clock, so ageing replaces it:
    a turn rises by one queue for every PLAS_AGEING_S it has waited longer than another. At one
    moment waits differ by arrivals only, so the order does not depend on the moment. No turn that arrives
    more than q x PLAS_AGEING_S after a turn in queue q overtakes it.
    """
    queue = (entry.attained_tokens // PLAS_QUANTUM_TOKENS).bit_length()
    return (
        entry.priority,
        not entry.preempted,
        entry.turn_arrival_s + queue * PLAS_AGEING_S,
        entry.program_arrival_s,
    )
