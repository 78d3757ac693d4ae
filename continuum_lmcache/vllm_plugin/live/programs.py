"""What an engine's programs do now, and its recording so far: for `continuum-lmcache top` and `report URL`.

Read only. Who asks often gets the same answer again, and costs the engine nothing.
"""

from __future__ import annotations

import json
import math
import secrets
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

from continuum_lmcache.programs.program import Program, Stage
from continuum_lmcache.programs.turns import Turn
from continuum_lmcache.telemetry.recorder import digest, plain
from continuum_lmcache.vllm_plugin.assembly import EngineParts

MOST_ROWS = 200
SAME_ANSWER_S = 0.5  # of programs
SAME_RECORDING_S = 5.0  # it may be 100 MB

Row = dict[str, Any]


class LivePrograms:
    """One engine's programs as rows, for other processes. Names are hashes, unless recordings have them."""

    def __init__(self, parts: EngineParts, clock: Callable[[], float]) -> None:
        self._engine, self._store, self._blocks = engine, _, _ = parts.engine, parts.residency, parts.blocks
        self._turns = engine.turns
        self._files, self._clock = parts.files, clock
        recorder = parts.files.recorder
        self._name = recorder.name if recorder else partial(digest, salt=secrets.token_bytes(16))
        self._said, self._said_s = "", -math.inf
        self._saved: Future[str] | None = None
        self._saved_s = -math.inf

    def text(self) -> str:
        """A JSON object: `programs`, a row each; `more` that are left out; `memory`."""
        now_s = self._clock()
        if now_s - self._said_s >= SAME_ANSWER_S:
            rows = list(self.rows(now_s))
            shown = {"programs": rows[:MOST_ROWS], "more": max(0, len(rows) - MOST_ROWS)}
            self._said, self._said_s = json.dumps(shown | {"memory": self._memory()}), now_s
        return self._said

    def save_recording(self) -> Future[str]:
        """Write the recording, in a thread; the result is its path, "" where none is kept."""
        now_s, saved = self._clock(), self._saved
        if saved is None or (saved.done() and now_s - self._saved_s >= SAME_RECORDING_S):
            self._saved, self._saved_s = saved, _ = Future(), now_s
            threading.Thread(target=self._save, args=(saved,), daemon=True).start()
        return saved

    def _save(self, saved: Future[str]) -> None:
        self._files.save()
        saved.set_result(str(self._files.recording_path or ""))

    def rows(self, now_s: float) -> Iterator[Row]:
        """The running programs, those that wait in the order in which they go on, those in a tool call."""
        turns, programs, pins = self._turns, self._engine.programs, self._engine.pins
        live = [turn for turn in turns.values() if not turn.program.is_one_turn]
        queued = [turn for turn in live if not turn.in_line and not self._runs(turn)]
        queued.sort(key=lambda turn: self._engine.order(turn, turn.id in turns.preempted))
        lined = sorted(filter(lambda turn: turn.in_line, live), key=place_in_line)
        for turn in live:
            if self._runs(turn):
                yield self._row(turn.program, "running", now_s - (turn.started_s or now_s))
        for state, waiting in (("waiting", queued), ("in line", lined)):
            for place, turn in enumerate(waiting, 1):
                bound_s = turn.program.starts_by_s - now_s if turn.in_line else None
                why = {
                    "place": place,
                    "starts_within_s": plain(bound_s),
                    "refused_memory": turn.id in turns.refused_memory,
                    "preempted": turn.id in turns.preempted,
                }
                yield self._row(turn.program, state, now_s - turn.arrival_s) | why
        away = {program.id: program for program in programs.away()}
        away |= {name: programs.records[name] for name in pins.pinned}
        for program in away.values():
            if program.turn is None:
                pin = pins.pinned.get(program.id)
                left_s = max(0.0, pin.deadline_s - now_s) if pin is not None else None
                since_s = now_s - (program.finished_s or program.seen_s)
                row = self._row(program, "in a tool call", since_s)
                has_place = program.stage is not Stage.YIELDED
                yield row | {"tool": " ".join(program.tool[:1]), "pinned_s": left_s, "has_place": has_place}

    def _runs(self, turn: Turn) -> bool:
        return turn.started_s is not None and turn.id not in self._turns.preempted

    def _row(self, program: Program, state: str, for_s: float) -> Row:
        return {
            "program": self._name(program.id),
            "state": state,
            "for_s": round(for_s, 3),
            "turns": program.turns,
            "context_tokens": max(program.context_tokens, program.last_tokens),
        }

    def _memory(self) -> Row:
        engine, store = self._engine, self._store.store
        singles, running = engine.programs.in_stage[Stage.SINGLE], len(engine.programs.running_singles)
        return {
            "kv_tokens": engine.kv_tokens,
            "blocks": engine.total_blocks,
            "free_blocks": self._blocks.free_count(),
            "pinned_blocks": engine.pins.pinned_blocks,
            "tier_tokens": {tier.value: tokens for tier, tokens in store.capacity_tokens().items()},
            "tiers": self._store.mode,
            "tiers_up": store.is_up,
            "longest_wait_s": engine.admission.longest_wait_s,
            "unnamed_running": running,
            "unnamed_waiting": singles - running,
        }


def place_in_line(turn: Turn) -> tuple[int, float]:
    return turn.program.priority, turn.program.line_since_s
