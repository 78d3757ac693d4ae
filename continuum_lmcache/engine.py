"""What happens to turns goes in, decisions come out: the one place that changes programs, turns and pins.

    turn_arrived -> turn_ran -> turn_ended       in each step: tick; every REFRESH_S: refresh

Each returns what happened and what was decided, in order (telemetry/events.py). No vLLM, no clock, no I/O:
vllm_plugin/scheduler.py passes values and carries the decisions out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from continuum_lmcache.admission.controller import AdmissionController, KVCapacity
from continuum_lmcache.config import ContinuumConfig
from continuum_lmcache.errors import InvariantError
from continuum_lmcache.policy.interface import End, EngineState, Order
from continuum_lmcache.policy.named import policy_of
from continuum_lmcache.programs.divergence import SLACK_BLOCKS, losses_of, same_blocks
from continuum_lmcache.programs.end_claims import EndClaims
from continuum_lmcache.programs.identity import ProgramFields, program_id
from continuum_lmcache.programs.program import RETURNS_KEPT, STANDING_KEPT_S, Program, Stage
from continuum_lmcache.programs.prompt_linker import HashedPrompt, LinkableTurn, ProgramLink, PromptLinker
from continuum_lmcache.programs.shared_prefixes import NO_HEAD, SharedPrefixIndex
from continuum_lmcache.programs.table import ProgramTable
from continuum_lmcache.programs.turns import Turn, TurnTable, prompt_key
from continuum_lmcache.reload.load_policy import LoadPolicy
from continuum_lmcache.retention.learned import Learned
from continuum_lmcache.retention.pin_renewal import PinRenewal
from continuum_lmcache.retention.pin_table import PinTable
from continuum_lmcache.telemetry.events import (
    Event,
    EvictFirst,
    PinReleased,
    PinRenewed,
    PinTaken,
    PrefixLost,
    ProgramAdmitted,
    ProgramEnded,
    ProgramHeld,
    TurnArrived,
    TurnFinished,
    TurnPreempted,
    TurnStarted,
)
from continuum_lmcache.types import (
    MOST_PROGRAMS,
    FinishedTurn,
    Pin,
    PinEnd,
    Place,
    ProgramId,
    Residency,
    Retention,
    Start,
    Tier,
    ToolKey,
    TurnId,
)

REFRESH_S = 10.0
MOST_STRANGERS = 2  # requests that begin otherwise than their program: a title's and a topic's
BEHIND = Start(False, "behind")  # of programs that wait behind the first in line
RETRY_S = 1.0  # equal requests that come sooner after each other are n answers, a list or a group


@dataclass(frozen=True, slots=True)
class NewTurn:
    id: TurnId
    fields: ProgramFields
    namespace: str  # identity.namespace_of
    priority: int
    may_be_linked: bool  # a request without a name may be a turn of a program


@dataclass(frozen=True, slots=True)
class Occupancy:
    """How busy the engine is before a step."""

    is_running: bool  # a turn runs
    is_queued: bool  # a turn waits that may run
    prompt_share: float  # of the latest steps' time, 0 to 1
    free_blocks: Callable[[], int]  # of the GPU


@dataclass(frozen=True, slots=True)
class ToolCall:
    """What a turn left that ended in a tool call."""

    tools: Sequence[ToolKey]  # of its calls; NO_CALL alone for an answer, none where neither can be told
    residency: Residency  # of its context, after the GPU evicts it
    block_ids: Sequence[int]  # that a next turn could hit, head first
    free_blocks: int  # of the GPU


@dataclass(frozen=True, slots=True)
class TurnEnd:
    is_end: bool  # it did not fail, and its client did not leave
    context_tokens: int
    output_tokens: int
    call: ToolCall | None = None  # if `Engine.ends_in_call`


class Engine:
    """One engine's programs, turns and pins: how each event changes them."""

    def __init__(
        self,
        config: ContinuumConfig,
        learned: Learned,
        total_blocks: int,
        block_tokens: int,
        hash_block_tokens: int,
    ) -> None:
        self.config, self.learned, self.policy = config, learned, policy_of(config)
        self.total_blocks, self.kv_tokens = total_blocks, total_blocks * block_tokens
        self.turns, self.programs, self.end_claims = TurnTable(), ProgramTable(MOST_PROGRAMS), EndClaims()
        budget = int(total_blocks * config.max_pinned_share)
        tenant_budget = int(budget * config.max_tenant_share)
        self.pins = PinTable(self.programs.records, budget, tenant_budget, config.max_ttl_s)
        self._renewal = PinRenewal(self.pins)
        self.load_policy = LoadPolicy(
            learned.rates, self.policy.to_load, lambda: (len(self.turns) - 1, self.kv_tokens)
        )
        self._hash_block_tokens = hash_block_tokens
        capacity, heads = self._capacity(), SharedPrefixIndex(hash_block_tokens)
        self.admission = AdmissionController(self.programs, capacity, config, self.policy, heads)
        self.linker = PromptLinker(MOST_PROGRAMS, hash_block_tokens)
        self._refresh_at_s = 0.0

    # a turn's life ---------------------------------------------------------

    def turn_arrived(self, now_s: float, new: NewTurn, prompt: HashedPrompt) -> list[Event]:
        """A request is here: find its program, learn from its tool gap, and let it run or wait in line.

        One that is no program's next turn counts as a program that ends with it, and needs no place.
        """
        key = prompt_key(new.namespace, new.fields, prompt, self._hash_block_tokens)
        twin = self.turns.get(self.turns.by_prompt.get(key, new.id))
        events: list[Event] = []
        if twin is not None and now_s - twin.arrival_s >= RETRY_S:
            name, link = twin.program.id, twin.link
            events.append(self._disown(now_s, twin))
        elif (found := self._program_of(new, prompt)) is not None:
            name, link = found
        else:
            program = self.programs.add(now_s, self._new_id(new), new.fields.owner, now_s, one_turn=True)
            self.programs.add_turn(now_s, new.id, program)
            self._queue_or_line_up(now_s, program, new, prompt, exempt=True)
            return []
        events.append(self._add_turn(now_s, name, new, prompt, link))
        self.turns[new.id].prompt, self.turns[new.id].link = key, link
        self.turns.by_prompt[key] = new.id
        return events

    def _program_of(self, new: NewTurn, prompt: HashedPrompt) -> tuple[ProgramId, ProgramLink | None] | None:
        """The program whose next turn the request is, and the turn that its prompt continues, if it is known.

        A name is checked against the prompt, since conversations may share one: a gateway's constant header,
        a session's short requests beside its main turns, n answers to a prompt. Of the requests with a name
        the one that continues the program's last turn is its next turn. So is a changed prompt, as after a
        compaction, unless it begins with another block. If they all do, the head of its prompts changes.
        The others are linked by their prompts alone. Once two conversations have shown the name, all are.
        """
        fields, program, same = new.fields, None, 0
        if fields.job_id is not None:
            name = program_id(fields.job_id, new.namespace)
            program = self.programs.records.get(name)
            if program is None:
                return name, None
            last, same = program.hashes, same_blocks(program.hashes, prompt.block_hashes)
            if program.turn is not None or program.is_name_shared:
                program = None
            elif not last or (same and same + SLACK_BLOCKS >= len(last)):
                program.strangers = 0
                last_turn = program.linkable
                return name, self.linker.take(prompt, last_turn) if last_turn is not None else None
        link = self.linker.find_link(prompt, fields) if new.may_be_linked else None
        if link is not None:
            linked = self.programs.records.get(link.program)
            if linked is None or (linked.turn is None and linked.linkable is link.turn):
                return link.program, link
            linked.is_name_shared = True  # it has gone on from another turn
            return self._new_id(new), link
        if program is None:
            return None
        program.strangers += not same
        is_next = same or fields.is_last_step or program.strangers > MOST_STRANGERS
        return (program.id, None) if is_next else None

    def _disown(self, now_s: float, turn: Turn) -> TurnFinished:
        """The turn's client has sent it again, and does not wait for this request any more: a proxy keeps it.
        It counts as one without a name."""
        program, was_waiting = turn.program, turn.started_s is None
        finished = self._end_without_pin(now_s, turn, TurnEnd(False, program.context_tokens, 0))
        turn.program = self.programs.add(now_s, self._new_id(turn), program.tenant, now_s, one_turn=True)
        turn.link, turn.may_be_linked = None, False
        self.programs.add_turn(now_s, turn.id, turn.program)
        self.programs.queue_turn(turn.program, program.context_tokens, NO_HEAD)
        if not was_waiting:
            turn.program.is_waiting = False
            self.programs.running_singles[turn.program.id] = turn.program
        self.turns.preempted.discard(turn.id)
        self.turns.to_rekey.add(turn.id)
        return finished

    def _new_id(self, request: NewTurn | Turn) -> ProgramId:
        name = ProgramId(f"~{request.id}")
        while name in self.programs.records:  # its client has used the id before
            name = ProgramId(f"{name}~")
        return name

    def _add_turn(
        self, now_s: float, name: ProgramId, new: NewTurn, prompt: HashedPrompt, link: ProgramLink | None
    ) -> TurnArrived:
        """The request is this program's next turn."""
        fields, ended = new.fields, self.end_claims.withdraw(new.fields.owner, name)
        arrival_s = now_s - (fields.age_s if fields.turns else 0.0)  # its age counts with its turns only
        if (before := ended or link) is not None:
            arrival_s = before.arrival_s
        program = self.programs.add(now_s, name, fields.owner, arrival_s, one_turn=False)
        if program.counts_as_ended:
            self.learned.gaps.withdraw_lost(program.tool, program.tenant)
        self.programs.expect_again(program)
        # on another engine, or in a first turn that had no program's name
        is_new = program.stage is Stage.IDLE and program.left is None
        has_started = fields.turns > program.turns or (is_new and link is not None)
        # the turn before was aborted although it looked like an end, or its answer was lost
        is_repeat = link is not None and link.turn.prompt_tokens == prompt.num_prompt_tokens
        if is_repeat and program.stage is Stage.OVERDUE and program.finished_s is not None:
            has_started |= now_s - program.finished_s <= STANDING_KEPT_S
        gap_s = self.programs.add_turn(now_s, new.id, program)
        elsewhere = max(fields.turns, ended.turns if ended is not None else 0)
        if elsewhere > program.turns:
            program.turns = elsewhere
            gap_s = None  # it was elsewhere
        elif link is not None:
            program.turns = max(program.turns, 1)  # the first one had no program
            gap_s = None if is_repeat else gap_s  # no tool ran
        self._queue_or_line_up(now_s, program, new, prompt, exempt=has_started)
        tool = (fields.last_tool or program.tool) if gap_s is not None else ()
        if gap_s is not None:
            self.learned.gaps.observe(tool, gap_s, program.tenant)
            others = [each for each in program.returned_from if each != program.tool]
            program.returned_from = (*others, program.tool)[-RETURNS_KEPT:]
        return TurnArrived(now_s, name, new.id, prompt.num_prompt_tokens, tool, gap_s)

    def _queue_or_line_up(
        self, now_s: float, program: Program, new: NewTurn, prompt: HashedPrompt, exempt: bool
    ) -> None:
        """The program's turn is here: it may run, or waits in the line. Nobody does without admission."""
        self.turns[new.id] = Turn(new.id, program, new.fields, now_s, new.priority, new.may_be_linked)
        self.admission.on_arrival(now_s, program, prompt, new.priority, exempt or not self.policy.admits)

    def turn_ran(
        self, now_s: float, turn: Turn, prompt: HashedPrompt, served: Residency, uses_pin: bool
    ) -> list[Event]:
        """The turn runs for the first time: it holds its own blocks now, so its program's pin ends.

        `served`: where its prompt came from. `uses_pin`: it has the pin's blocks.
        """
        self.turns.start(now_s, turn)
        program, hashes, found_tokens = turn.program, prompt.block_hashes, turn.found_tokens
        program.is_waiting = False
        if not program.turns:  # else it found what its own last turn left
            self.admission.on_prefix_hit(program, hashes, found_tokens)
        if program.is_one_turn:
            self.programs.running_singles[program.id] = program
            return []
        self.pins.turn_stopped_waiting(program.id)
        context_tokens = min(program.last_tokens, prompt.num_prompt_tokens)
        evicted = context_tokens - turn.gpu_tokens > SLACK_BLOCKS * self._hash_block_tokens
        if evicted and turn.id not in self.load_policy.declined:  # else less was loaded than was held
            self.learned.survival.on_return(program.residency, served, context_tokens)
        delay_s = now_s - turn.arrival_s
        if evicted and program.placed_s <= turn.arrival_s:  # else it waited for its place, not for memory
            self.learned.observe_queue_delay(delay_s)
        events: list[Event] = [TurnStarted(now_s, program.id, turn.id, served, delay_s, evicted)]
        losses = losses_of(program.hashes, prompt, self._hash_block_tokens, program.last_tokens, found_tokens)
        if program.hashes:
            same = same_blocks(program.hashes, hashes) / len(program.hashes)
            program.repeated = (*program.repeated[1:], same)
        events += [PrefixLost(now_s, program.id, turn.id, loss) for loss in losses]
        return events + self._unpin(now_s, program.id, PinEnd.REUSED if uses_pin else PinEnd.DIVERGED)

    def turn_preempted(self, now_s: float, turn: Turn) -> list[Event]:
        if turn.program.is_one_turn:
            return []
        self.turns.preempted.add(turn.id)
        return [TurnPreempted(now_s, turn.program.id, turn.id)]

    def turn_resumed(self, now_s: float, turn: Turn, served: Residency) -> list[Event]:
        self.turns.preempted.discard(turn.id)
        delay_s = now_s - turn.arrival_s
        return [TurnStarted(now_s, turn.program.id, turn.id, served, delay_s, resumed=True)]

    def ends_in_call(self, turn: Turn, is_end: bool) -> bool:
        """Whether the turn's program goes on after a tool call, so that its KV may stay."""
        return is_end and not turn.program.is_one_turn and not turn.fields.is_last_step

    def turn_ended(self, now_s: float, turn: Turn, prompt: HashedPrompt, end: TurnEnd) -> list[Event]:
        """The turn's request is about to be freed: keep its KV, if it ended in a tool call and that pays.
        `prompt` has its output now."""
        self.load_policy.on_turn_end(turn.id)
        program = turn.program
        if turn.started_s is not None:
            self.admission.on_turn_end(now_s)
            program.attained_tokens += end.context_tokens - turn.found_tokens
        if program.is_one_turn:
            self.programs.remove_turn(now_s, program)
            self.programs.drop(program)
            if end.is_end and turn.may_be_linked and not turn.fields.is_last_step:
                self._note_linkable(turn, prompt)
            return []
        if end.call is not None:
            return self._end_in_call(now_s, turn, prompt, end, end.call)
        if end.is_end:
            return self._end_program(now_s, turn, prompt, end)
        if turn.link is not None:
            program.linkable = self.linker.put_back(turn.link, program.id)
        return [self._end_without_pin(now_s, turn, end)]

    def _end_in_call(
        self, now_s: float, turn: Turn, prompt: HashedPrompt, end: TurnEnd, call: ToolCall
    ) -> list[Event]:
        """Ask the policy for how long the turn's KV stays, and whether its program keeps its place."""
        program, tokens, where = turn.program, end.context_tokens, call.residency
        one, gaps = len(call.tools) == 1, self.learned.gaps
        tool = call.tools[0] if one else gaps.of(program.tenant).slowest(call.tools)
        state = self.state_of(tool, program.tenant, where, call.free_blocks)  # an older pin counts as memory
        keeps = self.admission.tier_keeps_waiting  # as it is before the turn counts
        ended = FinishedTurn(
            program.id,
            program.turns + 1,
            tool,
            tokens,
            len(call.block_ids),
            where,
            program.tenant,
            program.repeated_share,
            place_turns=program.turns + 1 - program.turns_before_place,
            place_s=now_s - program.placed_s,
            line_reload_s=state.reload_s if keeps else state.costs.prefill_s(tokens),
            has_returned=tool in program.returned_from,
        )
        retention = self._retain(ended, state)
        place = self.admission.place_of(now_s, ended, state, self.turns)
        if not place.is_kept:
            retention = replace(retention, ttl_s=0.0, reason="yields")
        events = self._unpin(now_s, program.id, PinEnd.SUPERSEDED)
        self.programs.finish_turn(now_s, program, ended, prompt, place)
        events.append(self._finished(now_s, turn, end, tool, retention, place))
        if (pin := self.pins.take(now_s, ended, retention, call.block_ids)) is not None:
            events.append(PinTaken(now_s, pin.program, pin))
        evicts = self.policy.evicts_first  # after the pin: its blocks do not go first
        if evicts is not None and evicts(End(False, 0, 0, state.lost_share, ended.has_returned)).is_first:
            events.append(self._evict_first(now_s, turn, prompt))
        program.linkable = self._note_linkable(turn, prompt) if turn.may_be_linked else None
        return events

    def _end_program(self, now_s: float, turn: Turn, prompt: HashedPrompt, end: TurnEnd) -> list[Event]:
        """The program's last turn: none of its KV is needed again."""
        program = turn.program
        events = self._unpin(now_s, program.id, PinEnd.ENDED)
        events.append(self._end_without_pin(now_s, turn, end))
        program.turns += 1
        events.append(self._drop(now_s, program))
        self.end_claims.claim(program)
        evicts, counts = self.policy.evicts_first, self.end_claims.counts(program.tenant)
        if evicts is not None and evicts(End(True, *counts, 0.0)).is_first:
            events.append(self._evict_first(now_s, turn, prompt))
        return events

    def state_of(self, tool: ToolKey, tenant: str, residency: Residency, free_blocks: int) -> EngineState:
        """What is known about a turn that has ended in a call of the tool."""
        learned = self.learned
        gaps, costs = learned.gaps.of(tenant), learned.rates.costs
        lost_share = gaps.longer_share(tool, math.inf)
        return EngineState(
            self.config,
            costs,
            gaps,
            lost_share,
            gaps.expected_s(tool, lost_share),
            costs.reload_s(residency, learned.survival.chances()),
            learned.queue_delay_s,
            self.programs.growth.eta,
            self.is_memory_short,
            self.total_blocks,
            free_blocks,
            self.pins.pinned_blocks,
        )

    def _retain(self, turn: FinishedTurn, state: EngineState) -> Retention:
        """The policy's answer, never beyond max_ttl_s."""
        found, config = self.policy.retain(turn, state), self.config
        ttl_s = min(found.ttl_s, config.max_ttl_s)
        return replace(found, ttl_s=ttl_s, reload_s=state.reload_s, policy=config.policy)

    def _retain_again(self, step: Occupancy, pin: Pin, away_s: float) -> Retention:
        """The policy's answer for a program that has been away so long."""
        turn, is_overdue = pin.turn, self.programs.records[pin.program].stage is Stage.OVERDUE
        state = self.state_of(turn.tool, turn.tenant, turn.residency, step.free_blocks())
        return self._retain(turn, replace(state, away_s=away_s, is_overdue=is_overdue))

    def program_released(self, now_s: float, name: ProgramId) -> list[Event]:
        """Its client says that it has ended. A turn that it still has is its last."""
        program = self.programs.records.get(name)
        if program is None or program.is_one_turn:
            return []
        if program.turn is not None:
            turn = self.turns[program.turn]
            turn.fields = replace(turn.fields, is_last_step=True)
            return []
        events = [*self._unpin(now_s, name, PinEnd.ENDED), self._drop(now_s, program)]
        self.end_claims.claim(program)
        return events

    def _end_without_pin(self, now_s: float, turn: Turn, end: TurnEnd) -> TurnFinished:
        """A turn that ran or loaded gives its program's standing up if another has waited for too long: sent
        again and again it would go before that one for ever."""
        has_not_begun = turn.started_s is None and not turn.found_tokens
        keeps_standing = has_not_begun or self.turns.longest_wait_s(now_s) < self.config.longest_wait_s
        self.programs.remove_turn(now_s, turn.program, keeps_standing)
        self.pins.turn_stopped_waiting(turn.program.id)
        return self._finished(now_s, turn, end)

    def _finished(
        self,
        now_s: float,
        turn: Turn,
        end: TurnEnd,
        tool: ToolKey = (),
        retention: Retention | None = None,
        place: Place | None = None,
    ) -> TurnFinished:
        return TurnFinished(
            now_s,
            turn.program.id,
            turn.id,
            tool=tool,
            context_tokens=end.context_tokens,
            output_tokens=end.output_tokens,
            is_last=turn.fields.is_last_step,
            retention=retention,
            place=place,
            first_token_s=turn.first_token_s,
        )

    def _note_linkable(self, turn: Turn, prompt: HashedPrompt) -> LinkableTurn:
        """A prompt without a name, or with a shared one, may continue this turn."""
        program, tokens = turn.program, turn.link.tokens if turn.link is not None else 0
        return self.linker.add_turn(prompt, program.id, program.arrival_s, tokens, turn.fields)

    def _evict_first(self, now_s: float, turn: Turn, prompt: HashedPrompt) -> EvictFirst:
        shared_tokens = self.admission.shared_prefixes.head(prompt.block_hashes).tokens
        return EvictFirst(now_s, turn.program.id, turn.id, shared_tokens)

    def _drop(self, now_s: float, program: Program) -> ProgramEnded:
        """The program ended, or is not waited for any more. Dropping its record is the whole clean-up."""
        if program.finished_s is not None and not program.counts_as_ended:  # it never came back from its call
            self.learned.gaps.add_lost(program.tool, program.tenant)
        self.programs.count_end(program)
        self.programs.drop(program)
        return ProgramEnded(now_s, program.id, program.turns)

    # each step -------------------------------------------------------------

    def tick(self, now_s: float, step: Occupancy) -> list[Event]:
        """Start programs for which there is room; then, since a program that starts at once waits for no
        pin, set pins' deadlines again and end the due ones."""
        events = self._start_programs(now_s, step)
        retain = partial(self._retain_again, step)
        for pin in self._renewal.renew_due(now_s, self.is_memory_short, retain):
            events.append(PinRenewed(now_s, pin.program, pin.deadline_s))
        for program in self.pins.due(now_s) if self.pins.pinned else ():
            events += self._unpin(now_s, program, PinEnd.EXPIRED)
        return events

    def _start_programs(self, now_s: float, step: Occupancy) -> list[Event]:
        for program in self.programs.expire_away(now_s, may_have_ended=self.policy.admits):
            self.learned.gaps.add_lost(program.tool, program.tenant)
        came, self.admission.came = self.admission.came, []
        if not self.admission.is_waited_for:
            return []
        is_idle, prompt_share = not (step.is_running or step.is_queued), step.prompt_share
        asked = self.admission.admit(now_s, is_idle, 1.0 if step.is_queued else prompt_share)
        events: list[Event] = [
            ProgramAdmitted(now_s, p.id, turn_of(p), start) for p, start in asked if start.may
        ]
        if asked and not asked[-1][1].may:
            first, start = asked[-1]
            if first.held_for != start.reason:
                first.held_for = start.reason
                events.append(ProgramHeld(now_s, first.id, turn_of(first), start))
            for program in came:
                if program.stage is Stage.IN_LINE and program is not first:
                    program.held_for = BEHIND.reason
                    events.append(ProgramHeld(now_s, program.id, turn_of(program), BEHIND, first.id))
        return events

    def is_refresh_due(self, now_s: float) -> bool:
        return now_s >= self._refresh_at_s

    def refresh(self, now_s: float, kv_tokens: int, tier_tokens: Mapping[Tier, int]) -> list[Event]:
        """Every REFRESH_S: drop programs without a turn for `program_idle_s`, and resize the GPU's cache and
        the tiers: their rates decide what counts as room, and engines that share one have equal parts."""
        self._refresh_at_s = now_s + REFRESH_S
        self.kv_tokens = kv_tokens
        self.learned.survival.resize(tier_tokens)
        self.admission.capacity = self._capacity()
        idle = self.programs.idle_programs(now_s, self.config.program_idle_s, self.pins.pinned)
        return [self._drop(now_s, program) for program in idle]

    def _capacity(self) -> KVCapacity:
        return KVCapacity(self.kv_tokens, self.learned.cheap_tier_tokens())

    def release_pins(self, now_s: float, programs: Sequence[ProgramId], why: PinEnd) -> list[Event]:
        """End these programs' pins: their memory was needed, or the cache is reset."""
        return [event for program in programs for event in self._unpin(now_s, program, why)]

    def _unpin(self, now_s: float, program: ProgramId, why: PinEnd) -> list[Event]:
        pin = self.pins.release(program, why)
        return [] if pin is None else [PinReleased(now_s, program, why, pin.block_ids)]

    # answers ---------------------------------------------------------------

    def order(self, turn: Turn, preempted: bool) -> Order:
        """The turn's place in the waiting queue: the smallest is first."""
        return self.policy.order(turn.queue_entry(preempted, turn.program.id in self.pins.pinned))

    @property
    def is_memory_short(self) -> bool:
        """Whether a turn was refused its blocks, or a program waits for a place."""
        return bool(self.turns.refused_memory) or self.programs.in_stage[Stage.IN_LINE] > 0

    def check(self) -> None:
        """Raise InvariantError unless the tables balance."""
        self.programs.check()
        self.pins.check()


def turn_of(program: Program) -> TurnId:
    if program.turn is None:
        raise InvariantError(f"program {program.id!r} is {program.stage.value} and has no turn")
    return program.turn
