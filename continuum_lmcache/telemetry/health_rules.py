"""Checks a running server by its metrics over some time.

`continuum-lmcache status` fills a ServerWindow from two scrapes of /metrics. A missing metric is None; the
rules that need it are listed as not evaluated (`not_evaluated`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from continuum_lmcache.telemetry.findings import Finding, error, note, warning

NOTHING: Mapping[str, float] = {}


@dataclass(frozen=True, slots=True)
class ServerWindow:
    """One server over `seconds`. Counts are of that time, gauges are means over it; None: missing."""

    seconds: float
    running_turns: float | None = None
    waiting_turns: float | None = None
    kv_usage: float | None = None  # share of the GPU's KV blocks in use, 0 to 1
    pinned_share: float | None = None  # share of them that pins hold
    finished_turns: float | None = None
    preemptions: float | None = None
    queue_s: float | None = None  # mean wait of the turns that left the queue
    prefill_s: float | None = None  # sum over the turns that started
    computed_tokens: float | None = None  # prompt tokens whose KV was neither on the GPU nor in a tier
    programs: float | None = None  # known to the scheduler
    context_tokens: float | None = None  # mean prompt
    working_set_tokens: float | None = None  # of all contexts in the working set
    tier_capacity_tokens: Mapping[str, float] = field(default_factory=dict)
    queried_tokens: float | None = None  # that the GPU had lost, and that were looked up in the tiers
    loaded_tokens: Mapping[str, float] = field(default_factory=dict)  # by tier, here and below
    load_s: Mapping[str, float] = field(default_factory=dict)
    store_s: float | None = None  # in which steps waited for stores
    load_decisions: Mapping[str, float] = field(default_factory=dict)
    rate_samples: Mapping[str, float] = field(default_factory=dict)
    tier_store_up: float | None = None  # 1: the tier store answers
    lost_s: Mapping[str, float] = field(default_factory=dict)  # prefill of lost prefixes, by cause
    lost_returns: Mapping[str, float] = field(default_factory=dict)
    lost_at_token: Mapping[str, float] = field(default_factory=dict)  # of the latest


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The values from which on a rule finds something."""

    queue_s: float = 5.0  # mean wait in the queue
    memory_full: float = 0.9  # share of the KV blocks
    low_batch_turns: float = 8.0  # running turns below which a GPU idles
    preemption_share: float = 0.05  # preemptions per finished turn
    store_share: float = 0.05  # share of the time in which steps wait for stores
    tier_hit_share: float = 0.5  # share of the tokens that the GPU lost, loaded from the tiers
    least_tokens: float = 1000.0  # with fewer, no rule about tokens applies
    lost_share: float = 0.02  # share of the time: prefill that a client could have avoided


def low_batch(seen: ServerWindow, targets: Thresholds) -> Iterator[Finding]:
    """Memory is full while few turns run and others wait: memory limits this server, not compute."""
    running, waiting, usage = seen.running_turns, seen.waiting_turns, seen.kv_usage
    if running is None or waiting is None or usage is None:
        return
    if usage < targets.memory_full or running >= targets.low_batch_turns or waiting < 1:
        return
    held = f", {seen.pinned_share:.0%} of it by pins" if seen.pinned_share else ""
    yield warning(
        "low-batch-memory-full",
        f"{running:.1f} turns run and {waiting:.1f} wait while {usage:.0%} of the KV cache is in use{held}",
        "give the KV cache more memory (--gpu-memory-utilization, tensor parallelism, --kv-cache-dtype fp8), "
        "or lower continuum.max_pinned_share if pins hold much of it",
    )


def preempting(seen: ServerWindow, targets: Thresholds) -> Iterator[Finding]:
    """Running turns lose their memory, and what they had computed."""
    if not seen.preemptions or seen.finished_turns is None:
        return
    share = seen.preemptions / max(seen.finished_turns, 1.0)
    if share > targets.preemption_share:
        yield warning(
            "preemptions",
            f"{seen.preemptions:.0f} preemptions for {seen.finished_turns:.0f} finished turns in "
            f"{seen.seconds:.0f} s",
            "too many long contexts run at once: lower --max-num-seqs, or give the KV cache more memory",
        )


def queueing(seen: ServerWindow, targets: Thresholds) -> Iterator[Finding]:
    """Turns wait longer than the target."""
    if seen.queue_s is not None and seen.queue_s > targets.queue_s:
        yield warning(
            "queue-over-target",
            f"turns waited {seen.queue_s:.1f} s in the queue on average, over the target of "
            f"{targets.queue_s:g} s",
            "more requests arrive than this server can process: send fewer, shorten contexts, "
            "or add a replica",
        )


def small_tier(seen: ServerWindow, targets: Thresholds) -> Iterator[Finding]:  # noqa: ARG001
    """The largest tier holds less than the programs' contexts."""
    if not seen.tier_capacity_tokens or seen.working_set_tokens is None:
        return
    largest = max(seen.tier_capacity_tokens.values())
    if largest < seen.working_set_tokens:
        yield warning(
            "tier-too-small",
            f"the programs' contexts add up to {seen.working_set_tokens:,.0f} tokens, and the largest tier "
            f"holds {largest:,.0f}",
            "an LRU below the working set evicts KV before its program returns: enlarge "
            "lmcache.max_local_cpu_size or add a disk (lmcache.local_disk, lmcache.max_local_disk_size)",
        )


def few_hits(seen: ServerWindow, targets: Thresholds) -> Iterator[Finding]:
    """The GPU is full and the tiers return little of what it lost: a tier is too small."""
    queried, full = seen.queried_tokens, (seen.kv_usage or 0.0) >= targets.memory_full
    if not full or queried is None or queried < targets.least_tokens:
        return
    loaded = sum(seen.loaded_tokens.values())
    if loaded / queried < targets.tier_hit_share:
        yield warning(
            "tier-misses",
            f"the tiers brought back {loaded:,.0f} of {queried:,.0f} prompt tokens that the GPU did not hold "
            f"({loaded / queried:.0%}; text that is new can never be there)",
            "unless most prompts are new, the tiers are smaller than the working set: enlarge "
            "lmcache.max_local_cpu_size or add a disk",
        )


def slow_reload(seen: ServerWindow, targets: Thresholds) -> Iterator[Finding]:
    """A tier returns a token more slowly than it is computed.

    Prefill time counts from the first schedule to the first token. It includes the loads, which are
    subtracted, and other turns' work in the same steps. So computing looks slower than it is, and a tier
    that is reported is slower for certain.
    """
    if seen.prefill_s is None or not seen.computed_tokens or seen.computed_tokens < targets.least_tokens:
        return
    compute_s = max(0.0, seen.prefill_s - sum(seen.load_s.values())) / seen.computed_tokens
    for tier, tokens in seen.loaded_tokens.items():
        reload_s = seen.load_s.get(tier, 0.0) / tokens if tokens >= targets.least_tokens else 0.0
        if reload_s > compute_s:
            yield warning(
                f"reload-slower-than-recompute-{tier}",
                f"loading from {tier} took {reload_s * 1e6:,.0f} us a token, "
                f"computing {compute_s * 1e6:,.0f} us",
                "measure the machine (profiles/measure.py) and set continuum.profile; if it stays so, drop "
                f"the {tier} tier",
            )


def store_stalls(seen: ServerWindow, targets: Thresholds) -> Iterator[Finding]:
    """Steps wait for stores to the tiers."""
    if seen.store_s is not None and seen.store_s / seen.seconds > targets.store_share:
        yield warning(
            "store-stalls",
            f"steps waited {seen.store_s:.2f} s of {seen.seconds:.0f} s for stores "
            f"({seen.store_s / seen.seconds:.0%})",
            "a slow disk tier delays the writer: use a faster one, lower lmcache.max_local_disk_size to 0, "
            "or set lmcache.save_decode_cache to false",
        )


def store_down(seen: ServerWindow, targets: Thresholds) -> Iterator[Finding]:  # noqa: ARG001 (one signature for all)
    """The tier store does not answer."""
    if seen.tier_store_up is not None and seen.tier_store_up < 1:
        yield error(
            "tier-store-down",
            "the tier store does not answer: what the GPU loses is computed again",
            "check that LMCache's server runs and can be reached; serving continues meanwhile",
        )


def guessed_rates(seen: ServerWindow, targets: Thresholds) -> Iterator[Finding]:  # noqa: ARG001
    """TTLs depend on assumed rates."""
    guessed = sorted(what for what, samples in seen.rate_samples.items() if samples <= 0)
    if guessed:
        yield note(
            "guessed-rates",
            f"no measurements for {', '.join(guessed)}",
            "measure with profiles/measure.py and set continuum.profile; real loads correct tiers' rates",
        )


REMEDIES = {  # causes in divergence.py that a user can remove
    "nonce": "each prompt has new text there: remove it, or send it last "
    "(Claude Code: CLAUDE_CODE_ATTRIBUTION_HEADER=0)",
    "tools": "a client changes its list of tools within a session: keep one list, in one order",
    "salt": "programs continue under another cache_salt or adapter: keep one for each",
    "thoughts": "the chat template removes the model's thinking: where the model allows it, serve with "
    "a template that keeps it",
    "answer": "a client or the chat template changes answers: send them back unchanged",
}


def diverging_prompts(seen: ServerWindow, targets: Thresholds) -> Iterator[Finding]:
    """Prompts differ from the turns before them, which costs prefill."""
    for cause, remedy in REMEDIES.items():
        lost_s = seen.lost_s.get(cause, 0.0)
        if lost_s > targets.lost_share * seen.seconds:
            at_token = seen.lost_at_token.get(cause)
            at = f", the latest at token {at_token:,.0f}" if at_token is not None else ""
            returns = f"{seen.lost_returns.get(cause, 0.0):.0f} returns in {seen.seconds:.0f} s"
            yield warning(
                f"lost-to-{cause}",
                f"{returns} need {lost_s:.2f} s of prefill again: prompts differ from the turn before{at}",
                remedy,
            )


@dataclass(frozen=True, slots=True)
class HealthRule:
    """One check, and the fields of a window that it needs."""

    find: Callable[[ServerWindow, Thresholds], Iterator[Finding]]
    needs: tuple[str, ...]


RULES: dict[str, HealthRule] = {
    "low batch with memory full": HealthRule(low_batch, ("running_turns", "waiting_turns", "kv_usage")),
    "preemption rate": HealthRule(preempting, ("preemptions", "finished_turns")),
    "queue over its target": HealthRule(queueing, ("queue_s",)),
    "tier smaller than the working set": HealthRule(
        small_tier, ("tier_capacity_tokens", "working_set_tokens")
    ),
    "tier hit rate": HealthRule(few_hits, ("kv_usage", "queried_tokens", "loaded_tokens")),
    "reload slower than recompute": HealthRule(
        slow_reload, ("prefill_s", "computed_tokens", "loaded_tokens")
    ),
    "store stalls": HealthRule(store_stalls, ("store_s",)),
    "tier store up": HealthRule(store_down, ("tier_store_up",)),
    "prompts repeat the turn before": HealthRule(diverging_prompts, ("lost_s",)),
    "rates measured": HealthRule(guessed_rates, ("rate_samples",)),
}


def diagnose(seen: ServerWindow, targets: Thresholds | None = None) -> list[Finding]:
    """All findings, in the order of RULES; [] if nothing is wrong, as far as the window shows."""
    within = targets or Thresholds()
    return [finding for rule in RULES.values() for finding in rule.find(seen, within)]


def not_evaluated(seen: ServerWindow) -> dict[str, tuple[str, ...]]:
    """The rules that could not be applied, each with its missing fields."""
    missing = {
        name: tuple(need for need in rule.needs if getattr(seen, need) in (None, NOTHING))
        for name, rule in RULES.items()
    }
    return {name: fields for name, fields in missing.items() if fields}
