"""The policy `continuum`: seven decisions, each a pure function that answers with its reason.

    retain          a turn ended in a tool call: for how long does its KV stay on the GPU?
    order           which of the turns that wait is next?
    may_start       may the first program in the line start?
    gives_up_place  a turn ended in a tool call: does its program give its place up?
    chunk           how many tokens has the next step?
    to_load         how much of what the tiers hold of a prompt is loaded?
    evicts_first    a turn ended: is its KV the next to be evicted?

Each is asked by engine.py, admission/controller.py, vllm_plugin/scheduler.py or reload/load_policy.py. These
keep what was observed, and decide nothing. docs/policy/ describes each decision.
"""

from __future__ import annotations

import math

from continuum_lmcache.policy.interface import (
    Chunk,
    End,
    EngineState,
    Eviction,
    FirstInLine,
    Line,
    Order,
    Places,
    Policy,
    Room,
    StepState,
)
from continuum_lmcache.policy.ttl_solver import best_ttl, retention_of
from continuum_lmcache.reload.load_policy import LoadChoice, LoadReason, LoadState, is_measured
from continuum_lmcache.types import (
    NO_CALL,
    FinishedTurn,
    Place,
    QueueEntry,
    Residency,
    Retention,
    Start,
    ToolKey,
)

# 1. For how long a finished turn's KV stays ---------------------------------------

DIVERGES = 0.25  # of what was kept: whose returns repeat less is not pinned
IDLE_PRICE = 0.1  # while none waits for memory: not 0, or a pin would never end; tuned (LOG.md, 2026-11-22)
CHEAP_SHARE = 0.5  # of the time of computing: where a reload takes less, a pin saves little
MOST = 0.5  # of the programs that made a call
LATE_S = 20.0  # most people reply later: at 10 s, programs lost their room just as they came back


def retain(turn: FinishedTurn, state: EngineState) -> Retention:
    """No pin after what few return from, else eq. 2. The benefit counts by the share of the kept contexts
    that the program's latest returns repeated."""
    if returns_late(turn.tool, state, turn.has_returned):
        return Retention(0.0, "returns-late")
    repeats = turn.repeated_share if turn.repeated_share >= DIVERGES else 0.0
    return solved(turn, state, repeats)


def solved(turn: FinishedTurn, state: EngineState, repeats: float = 1.0) -> Retention:
    """Eq. 2 (arXiv 2511.02230 §4), with PrefillReload from where the prefix really is.

    A return in time saves T * eta of queueing and the reload. A negative eta (long programs become longer)
    lowers the benefit, as in the formula. While cold, eta is 1. For a program that is away already, only the
    rest of the gap counts.

    Beyond the paper, a second of a pin has its full price only while somebody waits for memory. So the TTL is
    asked for again when memory gets short, and when the pin expires. Admission makes this pay: what a pin
    holds was mostly reserved for its program. Where a tier returns the context cheaply, the price stays.
    Exp(1), while cold, has no memory: it would keep an ended program's pin for ever.
    """
    seen = state.gaps.distribution(turn.tool).after(state.away_s)
    is_cold = seen.level == "cold"
    benefit_s = repeats * (state.queue_delay_s * (1.0 if is_cold else state.eta) + state.reload_s)
    asks_again = state.reload_s >= CHEAP_SHARE * state.costs.prefill_s(turn.context_tokens)
    price = IDLE_PRICE if asks_again and not state.is_memory_short else 1.0
    ttl_s = best_ttl(seen, benefit_s, state.config.max_ttl_s, price)
    if is_cold and state.is_overdue and state.is_memory_short:
        ttl_s = 0.0
    reason = "cold-start" if is_cold else "cdf" if repeats else "diverges"
    return retention_of(seen, ttl_s, benefit_s, reason, price, asks_again)


def returns_late(tool: ToolKey, state: EngineState, has_returned: bool = False) -> bool:
    """Whether most programs end with the call, or it is an answer to which most people reply late.

    A slow tool is no such case: where it returns, the program has many turns left (LOG.md, 2026-11-26).
    Nor is one from which this program has returned: others that call once and leave say nothing of it.
    """
    if tool == NO_CALL:
        return state.gaps.longer_share(tool, LATE_S) > MOST
    return state.lost_share > MOST and not has_returned


# 2. Which waiting turn is next ------------------------------------------------------


def order(entry: QueueEntry) -> Order:
    """The client's priority, if it is honoured; preempted turns; those with a pin; then the time at which the
    program came, or after it had given its place up came to wait for another."""
    return (
        entry.priority,
        not entry.preempted,
        not entry.pinned,
        entry.program_order_s,
        entry.turn_arrival_s,
    )


# 3. Which program may start ---------------------------------------------------------

BUSY_SHARE = 0.35  # of the time for prompts: traces have 0.03 to 0.33, Table 1 0.57 to 0.70 (LOG.md)


def may_start(first: FirstInLine, room: Room) -> Start:
    """The active programs' KV must fit the GPU, and that of all started ones the GPU or a tier.

    A started program returns for its next turn and needs its context again. When the GPU and the tiers hold
    as much as they can, one more makes all of them reload or recompute. In the line it needs no memory
    (admission by working set: P. J. Denning, CACM 11(5), 1968; for agents CONCUR, arXiv 2601.22705). While
    prompts take little of the time, one a step starts without room: what it evicts is computed again in time
    that no other turn needs. For one that fits never, waiting brings nothing.
    """
    need_tokens, free_tokens = first.need_tokens, room.free_tokens(first.unnamed_tokens)
    fits_never = need_tokens > max(room.fits_tokens, room.tier_tokens)
    if room.is_idle:
        reason = "idle"
    elif room.last.reason == ALL_WAIT_ALIKE:
        reason = ALL_WAIT_ALIKE
    elif room.prompt_share < BUSY_SHARE:
        reason = "few-prompts"
    elif fits_never and first.waited_s >= room.config.longest_wait_s:
        reason = "fits-never"
    elif need_tokens <= free_tokens:
        reason = "room"
    elif first.is_promised:
        reason = "promised"
    else:
        return Start(False, "no-room", need_tokens, free_tokens)
    return Start(True, reason, need_tokens, free_tokens)


# 4. Who gives the place up ----------------------------------------------------------

ALL_WAIT_ALIKE = "all-wait-alike"  # nobody keeps a place, and nobody stands in the line
SLICE_RELOADS = 3.0  # of all programs with a place: so at most a third of the time goes into reloads
TIER_RELOADS = 10.0  # with a tier: the fewer programs change, the more of those that wait are still in it
SLICE_TURNS = 5  # at least: so at most a fifth of the turns wait in the line
REFILL_GAPS = 1.5  # a place is not worth a tool gap if the GPU's whole cache is filled again in so many gaps
LEAST_GAP_S = 1.0  # and if the gap is no shorter: at 0.3 s a burst of programs ended a quarter later (LOG.md)
LATE_SHARE = 0.1  # of the latest turns: so the 90th percentile of first tokens is in time
GAP_PART = 0.25  # of the longest wait, since ended programs keep theirs too; at two thirds more were late
LONGEST_WAITS = 1.5  # mean waits: the 90th percentile where turns go by arrival
KEEPS = 1.25  # times each limit of the choice between places and sharing, before it changes back


def gives_up_place(turn: FinishedTurn, state: EngineState, places: Places) -> Place:
    """A place lasts for a slice at least, and for as long as no turn waits longer than the setting.

    When all give way, the last in the line has its place after one end of a turn for each that waits. While
    too many turns are late, a place outlasts longer gaps, if most programs that are away for so long return:
    most late turns are of programs that have lost their place in a gap. One whose program returns late, if at
    all, is kept for no time (docs/policy/places.md).
    """
    expected_s = 0.0 if returns_late(turn.tool, state, turn.has_returned) else state.expected_s
    most_s = places.config.longest_wait_s
    spare_s = most_s - places.longest_wait_s - places.waiting * places.turn_s
    if expected_s and places.late_share > LATE_SHARE:
        are_away = state.gaps.longer_share(turn.tool, expected_s)  # for as long; the lost ones among them
        if state.lost_share <= MOST * are_away:
            expected_s = max(expected_s, min(spare_s, GAP_PART * most_s))
    if not places.waiting:
        return Place(True, "nobody-waits", expected_s)
    if all_wait_alike(places):
        return Place(False, ALL_WAIT_ALIKE, expected_s)
    if turn.place_turns < SLICE_TURNS or turn.place_s < slice_s(turn.line_reload_s, places):
        return Place(True, "slice", expected_s)
    if spare_s > 0.0:
        return Place(True, "hold", expected_s)
    return Place(False, "slice-over", expected_s)


def all_wait_alike(places: Places) -> bool:
    """Whether places are not worth tool gaps, and first tokens come in time where all wait equally long.

    In a refill, contexts like the latest fill all of the GPU's cache again: the memory of one context yields
    as much as the reload of one costs. So for longer gaps other programs use the memory better. The mean wait
    is the number of waiting turns over turns a second (J. D. C. Little, Operations Research 9(3), 1961).
    """
    if places.has_tier:
        return False
    keeps = KEEPS if places.last.reason == ALL_WAIT_ALIKE else 1.0
    wait_s = LONGEST_WAITS * places.waiting * places.turn_s
    return (
        places.gap_s * keeps >= LEAST_GAP_S
        and places.refill_s < REFILL_GAPS * places.gap_s * keeps
        and wait_s < places.config.first_token_limit_s * keeps
    )


def slice_s(reload_s: float, seen: Places | Line) -> float:
    """How long a place is kept though others wait, by what the context costs after a wait in the line. Each
    of the started programs gives its place up once a slice: so reloads take `started` * `reload_s` of it.

    Programs that take turns in a circle come back in the order in which a tier loses their contexts. So it
    loses just those that come next: with slices of three reloads a third of the GPU's time recomputed them.
    """
    return (TIER_RELOADS if seen.has_tier else SLICE_RELOADS) * reload_s * seen.started


def longest_wait_s(line: Line) -> float:
    """The bound of a wait in the line for a program that comes now, beside the turns under way: the setting,
    or a slice for each round in which all with a place have changed, if that is more."""
    rounds = 1 + line.tenants * line.most_of_one // max(1, line.started)
    turns_s = SLICE_TURNS * line.started * line.call_s
    return max(line.config.longest_wait_s, rounds * max(slice_s(line.longest_reload_s, line), turns_s))


# 5. How much a step computes --------------------------------------------------------

SMALLEST_TOKENS = 128  # of a chosen chunk: below it a card's step takes the time of reading the weights
PROMPT_TOKENS = 2048  # P below, assumed; so many at least in a step whose prompts are not cut


def chunk(step: StepState) -> Chunk:
    """Every decode in a step waits for the prompts in it. A prompt that is cut into n steps more ends n * F
    later, and so does each turn that waits behind it. F is the time of a step with a prompt, without the
    prompt's tokens. In these steps each of the R decoding turns gets n tokens: it ends n inter-token times
    earlier, and n * F later. A turn that ends meanwhile does not wait for the rest of the prompt: per step
    that is half the time of the prompt tokens that come per decoded token. So a smaller chunk pays if

        R * (inter-token time + prompt time per decoded token / 2 - F) > (1 + waiting turns) * F

    Where it does not, all prompts that share a step still end with it. In two halves of a step of B tokens,
    B / 2P prompts of P tokens end B / 2 tokens earlier, and all turns that wait end F later. So halves pay
    beyond B = 2 * sqrt(P * (1 + waiting turns) * F / time of a prompt's token).

    With a share below their arrival rate, prompts would wait instead of decodes. So the share is computed for
    all running turns. A chunk takes no less time than F, so a prompt takes at most twice its time. All times
    are measured in the running server. While prompts take little of the time and no turn waits for memory,
    the budget is vLLM's own: then first tokens matter more. So do they to a request that is no program's
    turn: its user waits for it alone, and behind a prompt in small chunks it would wait for many steps.
    Figures: experiments/records/LOG.md.
    """
    if step.prompt_share < BUSY_SHARE and not step.is_memory_short:
        return Chunk(step.most_tokens, "few-prompts")
    if step.waiting_singles:
        return Chunk(step.most_tokens, "single-waits")
    times, decodes = step.times, step.decoding * step.each
    if not times.prompts_are_known:
        return Chunk(min(step.most_tokens, decodes + PROMPT_TOKENS), "unmeasured")
    fixed_s, token_s = times.prompt_s()
    fixed_tokens = math.ceil(fixed_s / max(token_s, 1e-9))
    halves_pay = round(2 * math.sqrt(PROMPT_TOKENS * (1 + step.waiting) * fixed_tokens))
    uncut = min(step.most_tokens, decodes + max(PROMPT_TOKENS, halves_pay))
    prompt_each = times.prompt_tokens_each
    if not (step.decoding and prompt_each is not None and times.decodes_are_known):
        return Chunk(uncut, "no-decodes")
    turns = max(step.decoding, step.running)
    gain_s = turns * (step.each * (times.inter_token_s + token_s * prompt_each / 2) - fixed_s)
    if gain_s <= (1 + step.waiting) * fixed_s:
        return Chunk(uncut, "uncut")
    tokens = max(SMALLEST_TOKENS, round(prompt_each * turns * step.each), fixed_tokens)
    return Chunk(min(step.most_tokens, decodes + tokens), "cut")  # where prompts pile up, above `uncut`


# 6. What is loaded ------------------------------------------------------------------


def to_load(where: Residency, state: LoadState) -> LoadChoice:
    """The cheapest option if every rate it uses was measured; else everything is loaded.

    The cost is the time of all turns. This turn waits for its load and its prefill. Each other turn waits for
    the prefill, and for its share of the memory that this turn holds meanwhile.

    Neither an assumption nor a single slow load may disable a cache. So every load is made until there are
    LEAST_SAMPLES of each rate. And a tier from which nothing is loaded is not timed, so sometimes one is
    loaded although computing is predicted to be cheaper (a trial): as often as its extra cost was saved up.
    """
    everything = where.dram_tokens + where.ssd_tokens
    if not is_measured(state.costs, where):
        return LoadChoice(LoadReason.UNMEASURED, everything)
    share = where.total_tokens / state.kv_tokens
    costs_s = {
        option.loaded_tokens: option.total_s + state.others * (option.prefill_s + share * option.total_s)
        for option in state.costs.load_options(where)
    }
    best = min(costs_s, key=costs_s.__getitem__)
    if best == everything:
        return LoadChoice(LoadReason.LOAD, everything, costs_s[best])
    excess_s = costs_s[everything] - costs_s[best]
    if 0.0 < excess_s <= state.trial_budget_s:
        return LoadChoice(LoadReason.TRIAL, everything, costs_s[best], excess_s)
    return LoadChoice(LoadReason.PARTIAL if best else LoadReason.RECOMPUTE, best, costs_s[best], excess_s)


# 7. What is evicted first -----------------------------------------------------------

LEAST_CLAIMS = 50  # the share of wrong claims is computed as if there were at least as many
WRONG_SHARE = 0.02  # above it, claims evict nothing


def evicts_first(end: End) -> Eviction:
    """What a client has said was the last turn, as long as at most WRONG_SHARE of the tenant's programs came
    back after such a turn: a wrong one evicts a context that is needed again. And what most programs do not
    return from."""
    if not end.is_told:
        return Eviction(end.lost_share > MOST and not end.has_returned, "usually-last")
    is_trusted = end.wrong_claims <= WRONG_SHARE * max(end.claims, LEAST_CLAIMS)
    return Eviction(is_trusted, "told" if is_trusted else "told-wrong-too-often")


continuum = Policy(
    retain=retain,
    order=order,
    may_start=may_start,
    gives_up_place=gives_up_place,
    chunk=chunk,
    to_load=to_load,
    evicts_first=evicts_first,
    longest_wait_s=longest_wait_s,
)
