"""The figures of a recording: of the run, by tool, by pin outcome, and how accurate P(tau) was."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from continuum_lmcache.recordings.program_history import (
    RecordedLoss,
    RecordedPin,
    RecordedProgram,
    RecordedTurn,
)
from continuum_lmcache.recordings.reader import Recording
from continuum_lmcache.tools.distribution import kaplan_meier

TIERS = ("gpu", "dram", "ssd")
BINS = 10
ROUNDING_S = 2e-6  # files hold times to the microsecond


@dataclass(frozen=True, slots=True)
class ReturnPrediction:
    """One prediction: back within `ttl_s` with probability `predicted`; observed for `watched_s`."""

    predicted: float
    ttl_s: float
    watched_s: float
    returned: bool  # at watched_s; false: not before the observation ended

    @property
    def known(self) -> bool:
        """Not censored: it returned, or was observed for the whole TTL."""
        return self.returned or self.watched_s >= self.ttl_s

    @property
    def in_time(self) -> bool:
        """It returned within its TTL."""
        return self.returned and self.watched_s <= self.ttl_s + ROUNDING_S


@dataclass(frozen=True, slots=True)
class CalibrationBin:
    """Predictions with about the same P(tau), and their outcomes."""

    predicted: float  # mean
    realised: float | None  # share that returned within their TTL; None: all censored at once
    predictions: int
    censored: int


def measure(run: Recording) -> dict[str, float | None]:
    """A run's figures by label, units in the label; None where the recording lacks the data."""
    turns, pins = run.turns, [pin for program in run.programs for pin in program.pins]
    complete = [p for p in run.programs if p.complete]
    return {
        "programs": len(run.programs),
        "programs complete": len(complete),
        "turns": len(turns),
        **spread("JCT", [jct_s(p) for p in complete]),
        "wall time [s]": wall_s(run),
        **cache(turns),
        **spread("queue wait", list(waits_s(turns))),
        "preemptions": sum(t.preemptions for t in turns),
        "pins": len(pins),
        "pins open at the end": sum(pin.ended_s is None for pin in pins),
        "pin time, sum [s]": sum(held_s(pin, run.end_s) for pin in pins),
        "pin time, mean [s]": mean(held_s(pin, run.end_s) for pin in pins),
        "calibration error": calibration_error(calibration(run)),
    }


def spread(name: str, values_s: Sequence[float]) -> dict[str, float | None]:
    """Mean and tail: a policy with a better mean may have a worse tail."""
    ranks = {"median": 50, "P95": 95, "P99": 99, "max": 100}
    tails = {f"{name}, {label} [s]": percentile(values_s, rank) for label, rank in ranks.items()}
    return {f"{name}, mean [s]": mean(values_s), **tails}


def jct_s(program: RecordedProgram) -> float:
    """Job completion time: first arrival to last departure, tools included (§6)."""
    return max(t.departure_s or 0.0 for t in program.turns) - program.turns[0].arrival_s


def wall_s(run: Recording) -> float | None:
    """First arrival to last departure of all."""
    ends = [t.departure_s for t in run.turns if t.departure_s is not None]
    return max(ends) - run.programs[0].turns[0].arrival_s if ends else None


def cache(turns: Sequence[RecordedTurn]) -> dict[str, float | None]:
    """How much prefill was saved when turns were first scheduled, and by which tier."""
    tokens = sources(turns)
    total = sum(tokens.values())
    hit = total - tokens.get("computed", 0)
    return {
        "cache hit ratio": hit / total if total else None,
        **{f"  {tier} part": tokens[tier] / total if tier in tokens else None for tier in TIERS},
        "prefill saved [tokens]": hit if total else None,
        "prefill computed [tokens]": total - hit if total else None,
    }


def sources(turns: Sequence[RecordedTurn]) -> dict[str, int]:
    """Prompt tokens by the source of their KV; "cached" where the recording does not split hits."""
    tokens: Counter[str] = Counter()
    for turn in turns:
        if turn.prompt_tokens is None or turn.hit_tokens is None:
            continue
        if turn.gpu_tokens is None:
            tokens["cached"] += turn.hit_tokens
        else:
            tokens.update({tier: getattr(turn, f"{tier}_tokens") or 0 for tier in TIERS})
        tokens["computed"] += turn.prompt_tokens - turn.hit_tokens
    return dict(tokens)


def waits_s(turns: Iterable[RecordedTurn]) -> Iterable[float]:
    """Seconds in the queue until first scheduled."""
    for turn in turns:
        if turn.queue_delay_s is not None:
            yield turn.queue_delay_s
        elif turn.started_s is not None:
            yield turn.started_s - turn.arrival_s


def held_s(pin: RecordedPin, end_s: float) -> float:
    """How long a pin lasted; an open one lasts until the recording's end."""
    return (end_s if pin.ended_s is None else pin.ended_s) - pin.taken_s


def outcomes(run: Recording) -> dict[str, list[float]]:
    """For how many seconds pins were held, by how they ended; the most frequent first."""
    found = defaultdict(list)
    for pin in (pin for program in run.programs for pin in program.pins):
        how = "open" if pin.ended_s is None else pin.outcome or "not recorded"
        found[how].append(held_s(pin, run.end_s))
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def losses(run: Recording) -> list[tuple[RecordedProgram, RecordedTurn, RecordedLoss]]:
    """What returns computed again, the most expensive first."""
    found = [(p, turn, loss) for p in run.programs for turn in p.turns for loss in turn.losses]
    return sorted(found, key=lambda item: -item[2].prefill_s)


def losses_by_cause(run: Recording) -> dict[str, list[RecordedLoss]]:
    """The same by cause, the most expensive first."""
    found = defaultdict(list)
    for _, _, loss in losses(run):
        found[loss.cause].append(loss)
    return dict(sorted(found.items(), key=lambda item: -sum(loss.prefill_s for loss in item[1])))


def tools(run: Recording) -> dict[str, list[RecordedTurn]]:
    """Turns by the command they called, the most frequent first; () means that no tool was recognised."""
    found = defaultdict(list)
    for turn in run.turns:
        if turn.tool is not None:
            found[turn.tool[0] if turn.tool else "(none)"].append(turn)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def predictions(run: Recording) -> list[ReturnPrediction]:
    """All predictions P(tau) > 0 of the run."""
    return [
        prediction_of(turn, program, run.end_s)
        for program in run.programs
        for turn in program.turns
        if turn.went_idle and turn.retention and turn.retention["ttl_s"] > 0
    ]


def prediction_of(turn: RecordedTurn, program: RecordedProgram, end_s: float) -> ReturnPrediction:
    """How long a prediction was observed: to the return, else to the recording's end.

    A pin that was reclaimed is censored there, since its KV was not kept until tau. A program that
    ended, or whose recording ended before its TTL, is censored too.
    """
    retention, since_s = turn.retention or {}, turn.departure_s or 0.0
    until_s = end_s if program.ended_s is None else min(end_s, program.ended_s)
    watched_s, returned = until_s - since_s, False
    if turn.gap_s is not None:
        watched_s, returned = turn.gap_s, True
    if turn.pin and turn.pin.outcome == "reclaimed" and turn.pin.ended_s is not None:
        watched_s, returned = turn.pin.ended_s - since_s, False
    return ReturnPrediction(retention["probability"], retention["ttl_s"], max(watched_s, 0.0), returned)


def calibration(run: Recording) -> list[CalibrationBin]:
    """Predicted against real P(tau), by equal bins of the prediction."""
    by_bin = defaultdict(list)
    for seen in predictions(run):
        by_bin[min(int(seen.predicted * BINS), BINS - 1)].append(seen)
    return [
        CalibrationBin(
            predicted=fmean(seen.predicted for seen in group),
            realised=realised(group),
            predictions=len(group),
            censored=sum(not seen.known for seen in group),
        )
        for _, group in sorted(by_bin.items())
    ]


def realised(group: Sequence[ReturnPrediction]) -> float | None:
    """Share that returns within its TTL, by Kaplan and Meier's estimate on time as a share of TTL.

    Without the censored ones short gaps would count too much, since they have less time to be censored.
    """
    if not any(seen.known for seen in group):
        return None
    ended = sorted(seen.watched_s / seen.ttl_s for seen in group if seen.in_time)
    censored = sorted(seen.watched_s / seen.ttl_s for seen in group if not seen.in_time)
    return kaplan_meier(ended, censored)[-1] if ended else 0.0


def calibration_error(found: Sequence[CalibrationBin]) -> float | None:
    """Mean distance of realised from predicted, weighted by the number of predictions; 0 is exact."""
    errors = [(abs(b.realised - b.predicted), b.predictions) for b in found if b.realised is not None]
    total = sum(weight for _, weight in errors)
    return sum(distance * weight for distance, weight in errors) / total if total else None


def mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return fmean(found) if found else None


def percentile(values: Sequence[float], rank: float) -> float | None:
    """The value at `rank` in [0, 100], interpolated linearly (numpy's default)."""
    if not values:
        return None
    ordered = sorted(values)
    place = (len(ordered) - 1) * rank / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])
