"""Who goes first? Sort keys of a waiting turn, smallest first. Snapshots: none depends on the clock."""

from __future__ import annotations

from continuum_lmcache.types import QueueEntry

PLAS_QUANTUM_TOKENS = 2048  # the first queue's width: one prefill step of vLLM's default budget
PLAS_PATIENCE_S = 30.0  # waiting so long makes up for one queue

Order = tuple[float, ...]


def request_fcfs(entry: QueueEntry) -> Order:
    """vLLM's fcfs: preempted turns at the front, then by arrival. The client's priority is not asked."""
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
    """Continuum (arXiv 2511.02230 §4): preempted, then with a pin, then program arrival.

    The client's priority stands before it where `honor_priority` says so; else it is 0 for everybody.
    """
    return (
        entry.priority,
        not entry.preempted,
        not entry.pinned,
        entry.program_arrival_s,
        entry.turn_arrival_s,
    )


def least_attained_service(entry: QueueEntry) -> Order:
    """Autellix's PLAS (arXiv 2502.13965): the program that was served least goes first.

    Queues double in width: queue 0 up to PLAS_QUANTUM_TOKENS of service, queue 1 up to twice that,
    and so on; arrival decides within one. Autellix moves a turn to the first queue once its
    program's waiting is a multiple of its service. That needs a clock, so ageing stands in for it:
    a turn rises by one queue for every PLAS_PATIENCE_S it has waited longer than another. At one
    moment waits differ by arrivals only, so the order can be written without the moment. A turn in
    queue q is overtaken by none that arrives more than q x PLAS_PATIENCE_S after it.
    """
    queue = (entry.attained_tokens // PLAS_QUANTUM_TOKENS).bit_length()
    return (
        entry.priority,
        not entry.preempted,
        entry.turn_arrival_s + queue * PLAS_PATIENCE_S,
        entry.program_arrival_s,
    )


AGEING = 0.05  # seconds of work that a second of waiting makes up for; tuned in the lab (LOG.md, 2026-11-22)


def line_rank(
    arrival_s: float,
    prompt_tokens: int,
    usual_tokens: float,
    usual_work_s: float,
    trust: float,
    max_wait_s: float,
    line_s: float = 0.0,
) -> float:
    """Where a new program stands in line: its arrival, moved by what its first prompt says of its work.

    Shortest first, with ageing: work * (prompt / usual) ** trust - AGEING * waited, where `trust`, 0 to
    1, says how much a first prompt tells: with 0 the order is that of arrivals. Differences of that do
    not depend on the moment, so it can be written as an arrival. The shift is within max_wait_s / 4
    either way, or within half of the wait that the line had when it came (`line_s`), if that is longer.
    So a program is passed by none that comes later than the two shifts together: max_wait_s / 2, or
    as long again as the line has stood.
    """
    if usual_tokens <= 0:
        return arrival_s
    shift_s = usual_work_s / AGEING * ((prompt_tokens / usual_tokens) ** trust - 1.0)
    most_s = max(max_wait_s / 4, line_s / 2)
    return arrival_s + max(-most_s, min(most_s, float(shift_s)))
