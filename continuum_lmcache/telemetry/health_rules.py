"""Checks a running server by its metrics. Each rule names what to do.

`continuum-lmcache status` reads the figures from one page of /metrics. A rule whose figures a server does
not report finds nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from continuum_lmcache.telemetry.findings import Finding, error, note, warning
from continuum_lmcache.telemetry.samples import NO_PIN

MEMORY_FULL = 0.9  # share of the KV blocks
LOW_BATCH_TURNS = 8.0  # running turns below which a GPU idles
PREEMPTION_SHARE = 0.05  # preemptions per finished turn
LOST_SHARE = 0.2  # of the computed prompt tokens: a client could have avoided to lose them
LEAST_TURNS = 20.0  # finished: with fewer, no rule about shares applies
SHORT_OF_MEMORY = 0.5  # share of the KV blocks at one moment: a prompt that waits may wait for memory
FOUND_SHARE = 0.8  # of the prompt tokens in the caches: little is left to gain


@dataclass(frozen=True, slots=True)
class ServerFigures:
    """One server now; counts are since its start. None or empty: it does not report this."""

    policy: str = ""  # "": continuum is not on
    programs: float | None = None  # known to the scheduler
    running_turns: float | None = None
    waiting_turns: float | None = None
    held_programs: float | None = None  # new programs that wait to start
    kv_usage: float | None = None  # share of the GPU's KV blocks in use, 0 to 1
    pinned_share: float | None = None  # share of them that pins hold
    finished_turns: float | None = None
    preemptions: float | None = None
    queried_tokens: float | None = None  # prompt tokens for which the prefix cache was asked
    found_tokens: float | None = None  # of these found on the GPU or by the connector
    first_token_s: float | None = None  # mean
    prompt_tokens: Mapping[str, float] = field(default_factory=dict)  # by tier; "none": computed
    pins: Mapping[str, float] = field(default_factory=dict)  # by outcome; "taken" counts all
    ttl_decisions: Mapping[str, float] = field(default_factory=dict)  # finished turns by their TTL's reason
    working_set_tokens: float | None = None  # of all contexts that are expected to continue
    tier_capacity_tokens: Mapping[str, float] = field(default_factory=dict)
    tier_store_up: float | None = None  # 1: LMCache's server answers
    lost_tokens: Mapping[str, float] = field(default_factory=dict)  # computed again, by cause
    ignored_fields: Mapping[str, float] = field(default_factory=dict)  # requests, by field

    @property
    def judged(self) -> bool:
        """Whether enough turns have ended for shares of them."""
        return (self.finished_turns or 0.0) >= LEAST_TURNS


def off(seen: ServerFigures) -> Iterator[Finding]:
    """The server runs without our scheduler."""
    if not seen.policy:
        served = (
            "" if seen.finished_turns else ", or it has served nothing yet: send a request, and ask again"
        )
        yield error(
            "continuum-is-off",
            "the server reports no continuum_policy_info",
            f"start it with --scheduling-policy continuum{served}",
        )


def store_down(seen: ServerFigures) -> Iterator[Finding]:
    """LMCache's server does not answer."""
    if seen.tier_store_up is not None and seen.tier_store_up < 1:
        yield error(
            "tier-store-down",
            "LMCache's server does not answer: what the GPU loses is computed again",
            "check that it runs and can be reached; serving continues meanwhile",
        )


def low_batch(seen: ServerFigures) -> Iterator[Finding]:
    """Memory is full while few turns run and others wait: memory limits this server, not compute."""
    running, waiting, usage = seen.running_turns, seen.waiting_turns, seen.kv_usage
    if running is None or waiting is None or usage is None:
        return
    if usage < MEMORY_FULL or running >= LOW_BATCH_TURNS or waiting < 1:
        return
    held = f", {seen.pinned_share:.0%} of it by pins" if seen.pinned_share else ""
    yield warning(
        "low-batch-memory-full",
        f"{running:.0f} turns run and {waiting:.0f} wait while {usage:.0%} of the KV cache is in use{held}",
        "give the KV cache more memory (--gpu-memory-utilization, tensor parallelism, --kv-cache-dtype fp8), "
        "or lower continuum.max_pinned_share if pins hold much of it",
    )


def preempting(seen: ServerFigures) -> Iterator[Finding]:
    """Running turns lose their memory, and what they had computed."""
    if seen.judged and (seen.preemptions or 0.0) > PREEMPTION_SHARE * (seen.finished_turns or 0.0):
        yield warning(
            "preemptions",
            f"{seen.preemptions:,.0f} preemptions for {seen.finished_turns:,.0f} finished turns",
            "too many long contexts run at once: lower --max-num-seqs, or give the KV cache more memory",
        )


def small_tier(seen: ServerFigures) -> Iterator[Finding]:
    """The largest tier holds less than the programs' contexts."""
    largest = max(seen.tier_capacity_tokens.values(), default=None)
    if largest is not None and seen.working_set_tokens is not None and largest < seen.working_set_tokens:
        yield warning(
            "tier-too-small",
            f"the programs' contexts add up to {seen.working_set_tokens:,.0f} tokens, and the largest tier "
            f"holds {largest:,.0f}",
            "it evicts KV before the program returns: give LMCache's server more DRAM (--l1-size-gb) "
            "or a disk",
        )


REMEDIES = {  # for prompts that change, by the third of the turn before in which they do
    "first": "text near the beginning is new in each prompt: send it last, or leave it out "
    "(a time; a list of tools; Claude Code: CLAUDE_CODE_ATTRIBUTION_HEADER=0)",
    "middle": "clients shorten or edit their histories: do that less often, and then by more",
    "last": "answers come back changed: send them back as they were, and serve with a chat template that "
    "keeps the model's thinking where the model allows it",
}


def changed_prompts(seen: ServerFigures) -> Iterator[Finding]:
    """Prompts differ from the turns before them, and what follows is computed again."""
    computed = seen.prompt_tokens.get("none", 0.0)
    for third, remedy in REMEDIES.items():
        lost = seen.lost_tokens.get(f"changed-{third}-third", 0.0)
        if seen.judged and lost > LOST_SHARE * computed:
            yield warning(
                f"prompts-change-in-{third}-third",
                f"prompts differ from the turn before in its {third} third: {lost:,.0f} of {computed:,.0f} "
                "computed tokens were computed again",
                remedy,
            )


def ignored(seen: ServerFigures) -> Iterator[Finding]:
    """Requests have fields that cannot be used."""
    if found := {name: n for name, n in seen.ignored_fields.items() if n}:
        listed = ", ".join(f"{name} in {n:,.0f}" for name, n in sorted(found.items()))
        yield note(
            "ignored-fields",
            f"fields of requests were ignored: {listed}",
            "correct the client (docs/clients.md), or set continuum.honor_priority or honor_program_age",
        )


def between(first: ServerFigures, last: ServerFigures) -> ServerFigures:
    """What `would_help` asks of a server between two looks: how counts grew, and the fuller state."""

    def grown(then: float | None, now: float | None) -> float | None:
        return None if then is None or now is None else now - then

    return ServerFigures(
        waiting_turns=max(first.waiting_turns or 0.0, last.waiting_turns or 0.0),
        kv_usage=max(first.kv_usage or 0.0, last.kv_usage or 0.0),
        finished_turns=grown(first.finished_turns, last.finished_turns),
        preemptions=grown(first.preemptions, last.preemptions),
        queried_tokens=grown(first.queried_tokens, last.queried_tokens),
        found_tokens=grown(first.found_tokens, last.found_tokens),
    )


def would_help(seen: ServerFigures) -> tuple[str, str]:
    """Whether continuum would speed up agents on this stock server: yes, little, no, or too early to tell;
    and because of what."""
    turns, usage, waiting = seen.finished_turns or 0.0, seen.kv_usage or 0.0, seen.waiting_turns or 0.0
    if not seen.judged:
        return "too early to tell", f"{turns:.0f} turns ended, and fewer than {LEAST_TURNS:.0f} say nothing"
    preempted = seen.preemptions or 0.0
    state = f"{usage:.0%} of the KV cache is in use, {waiting:.0f} turns wait, {preempted:,.0f} preemptions"
    found = (seen.found_tokens or 0.0) / seen.queried_tokens if seen.queried_tokens else 0.0
    state += f" for {turns:,.0f} turns, and {found:.0%} of the prompt tokens were found in the caches"
    is_short = (usage >= SHORT_OF_MEMORY and waiting >= 1) or preempted > PREEMPTION_SHARE * turns
    if is_short and found < FOUND_SHARE:
        return "yes", f"{state}: memory is short. Only where requests are agents' turns, not single questions"
    if is_short:
        return "little", f"{state}: memory is short, but little is computed again"
    return "no", f"{state}: memory is not short. Ask again at the busiest hour"


WHY_NOT_PINNED = {  # by the reason of a TTL of 0
    "cold-start": "no tool gap is known yet, and to compute such a context again takes less than a second",
    "cdf": "to load or compute the contexts again costs less than the gaps of their tools",
    "returns-late": "most programs end with such a call, or stay away for long",
    "yields": "programs gave their places up to others that waited",
}
RULES = (off, store_down, low_batch, preempting, small_tier, changed_prompts, ignored)


def diagnose(seen: ServerFigures) -> list[Finding]:
    """All findings, in the order of RULES; [] if nothing is wrong, as far as the figures show."""
    return [finding for rule in RULES for finding in rule(seen)]


def summary(seen: ServerFigures) -> str:
    """Whether continuum is on, and what it brings."""
    if not seen.policy:
        if not seen.finished_turns:
            return "continuum is NOT on here, or has served nothing yet."
        return "continuum is NOT on here. Would it help? {}: {}.".format(*would_help(seen))
    parts = [f"continuum is on: policy {seen.policy}, {seen.programs or 0:,.0f} programs known."]
    if total := sum(seen.prompt_tokens.values()):
        shares = ", ".join(
            f"{tokens / total:.0%} {'computed' if tier == 'none' else tier}"
            for tier, tokens in seen.prompt_tokens.items()
        )
        parts.append(f"Prompt tokens by the source of their KV: {shares}.")
    parts.append(f"Pins: {seen.pins.get('taken', 0):,.0f} taken, {seen.pins.get('reused', 0):,.0f} reused.")
    if seen.ttl_decisions and not seen.pins.get("taken"):
        label = max(seen.ttl_decisions, key=lambda name: seen.ttl_decisions[name])
        reason = label.removesuffix(NO_PIN)
        parts.append(f"No turn was pinned: {WHY_NOT_PINNED.get(reason, reason)}.")
    if seen.first_token_s is not None:
        parts.append(f"First tokens came after {seen.first_token_s:.3g} s on average.")
    return " ".join(parts)
