"""Sort keys of a waiting turn, smallest first. Snapshots: none depends on the clock."""

from __future__ import annotations

from continuum_lmcache.types import QueueEntry

PLAS_QUANTUM_TOKENS = 2048  # the first queue's width: one prefill step of vLLM's default budget
PLAS_AGEING_S = 30.0  # a wait of this length makes up for one queue

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
    programs take turns on the GPU, the turn's own arrival (docs/decisions/0009).

    The client's priority comes first if `honor_priority` is set; else it is 0 for all.
    """
    return (
        entry.priority,
        not entry.preempted,
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


AGEING_RATE = 0.05  # seconds of work that a second of waiting makes up for; tuned (LOG.md, 2026-11-22)


def line_rank(
    arrival_s: float,
    prompt_tokens: int,
    usual_tokens: float,
    usual_work_s: float,
    exponent: float,
    max_wait_s: float,
    line_s: float = 0.0,
) -> float:
    """A new program's place in the line: its arrival, shifted by the work that its first prompt predicts.

    Shortest first, with ageing: work * (prompt / usual) ** exponent - AGEING_RATE * waited. With an
    `exponent` of 1 the work is proportional to the first prompt; with 0 the order is that of arrivals.
    Differences of these values do not depend on the moment, so the place can be an arrival time. The shift
    is within max_wait_s / 4 either way. If half of `line_s`, the longest wait in the line when the program
    came, is longer, the shift is within that. So no program overtakes one that arrived earlier by more than
    the sum of their two bounds: max_wait_s / 2, or the line's own wait.
    """
    if usual_tokens <= 0:
        return arrival_s
    shift_s = usual_work_s / AGEING_RATE * ((prompt_tokens / usual_tokens) ** exponent - 1.0)
    most_s = max(max_wait_s / 4, line_s / 2)
    return arrival_s + max(-most_s, min(most_s, float(shift_s)))
