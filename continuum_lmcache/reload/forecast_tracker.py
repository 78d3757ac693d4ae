"""Compares the predicted cost of a reload with the real one.

    add_forecast    a turn finished: PrefillReload predicts what a return costs without the GPU's copy
        on_allocated    the program is back and the GPU's copy was lost: a part is loaded, a part is computed
        on_step         the loads' times from the connector, and the context's share of each step's seconds
        ReloadOutcome   both numbers

A step's seconds, without those it waited for loads, are divided among its tokens by the prefill curve. Tokens
after the context, such as a tool's result, do not belong to the reload.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from continuum_lmcache.reload.cost_model import PrefillCurve
from continuum_lmcache.reload.tier_store import KVTransfer
from continuum_lmcache.types import ProgramId, TurnId


@dataclass(frozen=True, slots=True)
class StepWork:
    """One step of the engine."""

    seconds: float
    work: Mapping[TurnId, tuple[int, int]]  # by turn: new tokens, and the tokens before them

    @property
    def new_tokens(self) -> int:
        return sum(new for new, _ in self.work.values())

    def weights(self, curve: PrefillCurve) -> dict[TurnId, float]:
        """Each turn's seconds by the curve, without its fixed part."""
        return {turn: weight_s(curve, new, before) for turn, (new, before) in self.work.items()}


@dataclass(frozen=True, slots=True)
class ReloadOutcome:
    """What a return cost, in seconds of the engine's time."""

    turn: TurnId
    program: ProgramId
    predicted_s: float
    load_s: float
    compute_s: float
    loaded_tokens: int
    computed_tokens: int  # of the context; not the new tokens after it

    @property
    def took_s(self) -> float:
        return self.load_s + self.compute_s


@dataclass(slots=True)
class PendingReload:
    """A return whose context is being loaded or computed."""

    program: ProgramId
    predicted_s: float
    found_tokens: int  # on the GPU
    loaded_tokens: int
    context_tokens: int  # of the prompt
    prompt_tokens: int
    load_s: float = 0.0
    compute_s: float = 0.0


class ReloadTracker:
    """Forecasts of paused programs, and the reloads of those whose next turn is here.

    A turn that lost at most `slack_tokens` (a partial block) is not tracked.
    """

    def __init__(self, slack_tokens: int = 0) -> None:
        self._slack_tokens = slack_tokens
        self._forecasts: dict[ProgramId, tuple[int, float]] = {}  # context tokens, PrefillReload
        self._pending: dict[TurnId, PendingReload] = {}
        self._ending: set[TurnId] = set()

    @property
    def is_tracking(self) -> bool:
        return bool(self._pending)

    def add_forecast(self, program: ProgramId, context_tokens: int, reload_s: float) -> None:
        """A turn finished, whose return would cost this without the GPU's copy; the latest one counts."""
        self._forecasts[program] = (context_tokens, reload_s)

    def on_allocated(
        self, turn: TurnId, program: ProgramId, gpu_tokens: int, loaded_tokens: int, prompt_tokens: int
    ) -> None:
        """A turn got its blocks. Tracked if there is a forecast and the GPU lost a part of the context."""
        forecast = self._forecasts.pop(program, None)
        if forecast is None:
            return
        known_tokens, predicted_s = forecast
        context_tokens = min(known_tokens, prompt_tokens)
        if gpu_tokens + self._slack_tokens < context_tokens:
            self._pending[turn] = PendingReload(
                program, predicted_s, gpu_tokens, loaded_tokens, context_tokens, prompt_tokens
            )

    def on_step(
        self, step: StepWork, moved: Sequence[KVTransfer], curve: PrefillCurve
    ) -> list[ReloadOutcome]:
        """A step ended, and these transfers with it. Returns the reloads that are complete now."""
        if not self._pending:
            return []
        for transfer in moved:
            pending = self._pending.get(TurnId(transfer.turn))
            if pending is not None and transfer.direction == "load":
                pending.load_s += transfer.duration_s
        computing_s = step.seconds - step_wait_s([t for t in moved if t.direction == "load"])
        weights = step.weights(curve)
        whole_s = sum(weights.values())
        complete = []
        for turn in self._pending.keys() & weights.keys():
            pending, (new, before) = self._pending[turn], step.work[turn]
            own = max(0, min(before + new, pending.context_tokens) - before)
            if whole_s:
                pending.compute_s += max(0.0, computing_s) * weight_s(curve, own, before) / whole_s
            if before + new >= pending.prompt_tokens:
                complete.append(outcome_of(turn, self._pending.pop(turn)))
        for turn in self._ending:
            self._pending.pop(turn, None)
        self._ending.clear()
        return complete

    def on_turn_end(self, turn: TurnId) -> None:
        """The turn ended or was preempted: only the step that is reported next still counts for it."""
        if turn in self._pending:
            self._ending.add(turn)

    def on_program_end(self, program: ProgramId) -> None:
        self._forecasts.pop(program, None)


def outcome_of(turn: TurnId, pending: PendingReload) -> ReloadOutcome:
    found = min(pending.found_tokens + pending.loaded_tokens, pending.context_tokens)
    return ReloadOutcome(
        turn,
        pending.program,
        pending.predicted_s,
        pending.load_s,
        pending.compute_s,
        pending.loaded_tokens,
        pending.context_tokens - found,
    )


def weight_s(curve: PrefillCurve, new_tokens: int, before_tokens: int) -> float:
    """Seconds of this many tokens by the curve, without its fixed part."""
    return curve.seconds(new_tokens, before_tokens) - (curve.fixed_s if new_tokens > 0 else 0.0)


def step_wait_s(moved: Sequence[KVTransfer]) -> float:
    """How long a step waited for its transfers."""
    return sum(transfer.duration_s for transfer in moved if transfer.in_step)
