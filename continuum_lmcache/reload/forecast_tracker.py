"""What bringing a context back really cost, beside what was foretold when its turn finished.

    finished     PrefillReload is foretold: what a return costs if the GPU's copy is lost
    placed       the program is back and its copy was lost: so much is loaded, so much computed
    stepped ...  loads as the connector timed them, and the context's share of each step's seconds
    reloaded     both numbers

A step's seconds, without those it waited for loads, are shared out over its tokens as the
prefill curve weighs them; the tokens after the context, a tool's result say, are not the reload's.
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
        """Each turn's seconds by the curve, its fixed part left out."""
        return {turn: weight_s(curve, new, before) for turn, (new, before) in self.work.items()}


@dataclass(frozen=True, slots=True)
class ReloadForecast:
    """What a finished turn's return would cost without the GPU's copy."""

    context_tokens: int
    reload_s: float


@dataclass(frozen=True, slots=True)
class ReloadOutcome:
    """What a return cost, in seconds of the engine's time."""

    turn: TurnId
    program: ProgramId
    foretold_s: float
    load_s: float
    compute_s: float
    loaded_tokens: int
    computed_tokens: int  # of the context; not the new tokens after it

    @property
    def took_s(self) -> float:
        return self.load_s + self.compute_s


@dataclass(slots=True)
class PendingReload:
    """A return under way."""

    program: ProgramId
    forecast: ReloadForecast
    found_tokens: int  # on the GPU
    loaded_tokens: int
    context_tokens: int  # of the prompt
    prompt_tokens: int
    load_s: float = 0.0
    compute_s: float = 0.0


class ReloadTracker:
    """Forecasts of programs that are away, and watches of turns that are coming back.

    Who lost no more than `slack_tokens`, a partial block say, lost nothing.
    """

    def __init__(self, slack_tokens: int = 0) -> None:
        self._slack_tokens = slack_tokens
        self._away: dict[ProgramId, ReloadForecast] = {}
        self._watches: dict[TurnId, PendingReload] = {}
        self._leaving: set[TurnId] = set()

    @property
    def watching(self) -> bool:
        """Whether any return is under way."""
        return bool(self._watches)

    def finished(self, program: ProgramId, forecast: ReloadForecast) -> None:
        """A turn finished; the latest one's forecast counts."""
        self._away[program] = forecast

    def placed(
        self, turn: TurnId, program: ProgramId, gpu_tokens: int, loaded_tokens: int, prompt_tokens: int
    ) -> None:
        """A turn got its blocks. Without a forecast, or with all of its context there, nothing is watched."""
        forecast = self._away.pop(program, None)
        if forecast is None:
            return
        context_tokens = min(forecast.context_tokens, prompt_tokens)
        if gpu_tokens + self._slack_tokens < context_tokens:
            self._watches[turn] = PendingReload(
                program, forecast, gpu_tokens, loaded_tokens, context_tokens, prompt_tokens
            )

    def stepped(
        self, step: StepWork, moved: Sequence[KVTransfer], curve: PrefillCurve
    ) -> list[ReloadOutcome]:
        """A step is over, and these transfers with it. Returns that are complete now."""
        if not self._watches:
            return []
        for transfer in moved:
            watch = self._watches.get(TurnId(transfer.turn))
            if watch is not None and transfer.direction == "load":
                watch.load_s += transfer.duration_s
        computing_s = step.seconds - waited_s([t for t in moved if t.direction == "load"])
        weights = step.weights(curve)
        whole_s = sum(weights.values())
        complete = []
        for turn in self._watches.keys() & weights.keys():
            watch, (new, before) = self._watches[turn], step.work[turn]
            own = max(0, min(before + new, watch.context_tokens) - before)
            if whole_s:
                watch.compute_s += max(0.0, computing_s) * weight_s(curve, own, before) / whole_s
            if before + new >= watch.prompt_tokens:
                complete.append(ended(turn, self._watches.pop(turn)))
        for turn in self._leaving:
            self._watches.pop(turn, None)
        self._leaving.clear()
        return complete

    def gone(self, turn: TurnId) -> None:
        """The turn ended or lost its place: the step that is reported next is the last that counts."""
        if turn in self._watches:
            self._leaving.add(turn)

    def over(self, program: ProgramId) -> None:
        """The program ended."""
        self._away.pop(program, None)


def ended(turn: TurnId, watch: PendingReload) -> ReloadOutcome:
    found = min(watch.found_tokens + watch.loaded_tokens, watch.context_tokens)
    return ReloadOutcome(
        turn,
        watch.program,
        watch.forecast.reload_s,
        watch.load_s,
        watch.compute_s,
        watch.loaded_tokens,
        watch.context_tokens - found,
    )


def weight_s(curve: PrefillCurve, new_tokens: int, before_tokens: int) -> float:
    """Seconds of so many tokens by the curve, without its fixed part."""
    return curve.seconds(new_tokens, before_tokens) - (curve.fixed_s if new_tokens > 0 else 0.0)


def waited_s(moved: Sequence[KVTransfer]) -> float:
    """How long a step waited for its transfers."""
    return sum(transfer.duration_s for transfer in moved if transfer.in_step)
