"""What an engine's programs do now, and its recording so far: for `continuum-lmcache top` and `report URL`.

Read only. Who asks often gets the same answer again, and costs the engine nothing.
"""

from __future__ import annotations

import json
import math
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from continuum_lmcache.programs.program import Program, Stage
from continuum_lmcache.programs.turns import Turn
from continuum_lmcache.telemetry.recorder import digest, plain
from continuum_lmcache.types import NO_CALL
from continuum_lmcache.vllm_plugin.assembly import EngineParts

MOST_ROWS = 200
SAME_ANSWER_S = 0.5  # of programs
SAME_RECORDING_S = 5.0  # it may be 100 MB

Row = dict[str, Any]


Shown = tuple[Program, Turn | None, str, int]
"""A program, its turn (None: it has none now), what it does, and its place among those, from 1."""


class LivePrograms:
    """One engine's programs as rows, for other processes. Names are hashes, unless recordings have them."""

    def __init__(self, parts: EngineParts, clock: Callable[[], float]) -> None:
        self._engine, self._residency, self._blocks = parts.engine, parts.residency, parts.blocks
        self._turns, self._pins = parts.engine.turns, parts.engine.pins
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
            found = self._shown()
            rows = [self._row(now_s, each) for each in found[:MOST_ROWS]]
            shown = {"programs": rows, "more": len(found) - len(rows), "memory": self._memory()}
            self._said, self._said_s = json.dumps(shown), now_s
        return self._said

    def save_recording(self) -> Future[str]:
        """Write the recording, in a thread; the result is its path, "" where none is kept."""
        now_s, saved = self._clock(), self._saved
        if saved is None or (saved.done() and now_s - self._saved_s >= SAME_RECORDING_S):
            self._saved = saved = Future()
            self._saved_s = now_s
            threading.Thread(target=self._save, args=(saved,), daemon=True).start()
        return saved

    def _save(self, saved: Future[str]) -> None:
        self._files.save()
        saved.set_result(str(self._files.recording_path or ""))

    def _shown(self) -> list[Shown]:
        """The running programs, those that wait in the order in which they go on, those that are away."""
        turns, programs = self._turns, self._engine.programs
        live = [turn for turn in turns.values() if not turn.program.is_one_turn]
        running = [turn for turn in live if self._runs(turn)]
        queued = [turn for turn in live if not turn.in_line and not self._runs(turn)]
        queued.sort(key=lambda turn: self._engine.order(turn, turn.id in turns.preempted))
        lined = [turn for turn in live if turn.in_line]
        lined.sort(key=lambda turn: (turn.program.priority, turn.program.line_since_s))
        away = {program.id: program for program in programs.away()}
        away |= {name: programs.records[name] for name in self._pins.pinned}
        states = (("running", running), ("waiting", queued), ("in line", lined))
        found = [(turn.program, turn, s, at) for s, turns_in in states for at, turn in enumerate(turns_in, 1)]
        gone = [program for program in away.values() if program.turn is None]
        does = ["has answered" if program.tool == NO_CALL else "in a tool call" for program in gone]
        return [*found, *((program, None, state, 0) for program, state in zip(gone, does, strict=True))]

    def _runs(self, turn: Turn) -> bool:
        return turn.started_s is not None and turn.id not in self._turns.preempted

    def _row(self, now_s: float, shown: Shown) -> Row:
        program, turn, state, place = shown
        since_s, more = program.finished_s or program.seen_s, Row()
        if turn is None:
            pin = self._pins.pinned.get(program.id)
            more["tool"] = " ".join(program.tool[:1])
            more["pinned_s"] = max(0.0, pin.deadline_s - now_s) if pin is not None else None
            more["has_place"] = program.stage is not Stage.YIELDED
        elif state == "running":
            since_s = turn.started_s or now_s
        else:
            since_s = turn.arrival_s
            more["place"] = place
            more["starts_within_s"] = plain(program.starts_by_s - now_s if turn.in_line else None)
            more["refused_memory"] = turn.id in self._turns.refused_memory
            more["preempted"] = turn.id in self._turns.preempted
        return {
            "program": self._name(program.id),
            "state": state,
            "for_s": round(now_s - since_s, 3),
            "turns": program.turns,
            "context_tokens": max(program.context_tokens, program.last_tokens),
            **more,
        }

    def _memory(self) -> Row:
        engine, store = self._engine, self._residency.store
        return {
            "kv_tokens": engine.kv_tokens,
            "blocks": engine.total_blocks,
            "free_blocks": self._blocks.free_count(),
            "pinned_blocks": engine.pins.pinned_blocks,
            "tier_tokens": {tier.value: tokens for tier, tokens in store.capacity_tokens().items()},
            "tiers": self._residency.mode,
            "tiers_up": store.is_up,
            "longest_wait_s": engine.admission.longest_wait_s,
            "unnamed_running": len(engine.programs.running_singles),
            "unnamed_waiting": engine.programs.waiting_singles,
        }
