"""Checks a running server by one page of its /metrics. Each rule names what to do.

Counts are since the server's start. A rule whose metrics a server does not report finds nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from continuum_lmcache.admission.served import engines_for
from continuum_lmcache.console.metrics_page import POLICY, MetricsPage
from continuum_lmcache.telemetry.findings import Finding, counted, error, note, warning
from continuum_lmcache.telemetry.samples import NO_PIN

MEMORY_FULL = 0.9  # share of the KV blocks
LOW_BATCH_TURNS = 8.0  # running turns below which a GPU idles
PREEMPTION_SHARE = 0.05  # preemptions per finished turn
NEW_WEIGHTS_SHARE = 0.05  # calls per finished turn
LOST_SHARE = 0.2  # of the computed prompt tokens: a client could have avoided to lose them
LEAST_TURNS = 20.0  # finished: with fewer, no rule about shares applies
SHORT_OF_MEMORY = 0.5  # share of the KV blocks at one moment: a prompt that waits may wait for memory
FOUND_SHARE = 0.8  # of the prompt tokens in the caches: little is left to gain

RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
FINISHED, PREEMPTIONS = "vllm:request_success_total", "vllm:num_preemptions_total"
QUERIED = "vllm:prefix_cache_queries_total"  # prompt tokens
FOUND = ("vllm:prefix_cache_hits_total", "vllm:external_prefix_cache_hits_total")  # on the GPU, and below it
OFF = "continuum-is-off"
FIRST_TOKEN = "vllm:time_to_first_token_seconds"


def policy(page: MetricsPage) -> str:
    """The policy in use; "": continuum is not on."""
    return next(iter(page.by(POLICY, "policy")), "")


def kv_usage(page: MetricsPage) -> float | None:
    """The share of the GPU's KV blocks in use, mean over engines."""
    shares = page.values("vllm:kv_cache_usage_perc")
    return sum(shares) / len(shares) if shares else None


def pinned_share(page: MetricsPage) -> float | None:
    sizes = page.by("vllm:cache_config_info", "num_gpu_blocks")  # by size, the number of engines that have it
    blocks = sum(int(size) * engines for size, engines in sizes.items() if size.isdecimal())
    pinned = page.total("continuum_pinned_blocks")
    return pinned / blocks if pinned is not None and blocks else None


def longest_wait_s(page: MetricsPage) -> float | None:
    """For how long a new program would wait for its place at most, on any engine."""
    return max(page.values("continuum_longest_wait_seconds"), default=None)


def replicas_in_time(page: MetricsPage) -> float | None:
    """How many engines like these would serve the programs of all in time; None: no program is live."""
    names = "continuum_live_programs", "continuum_programs_in_time"
    return engines_for(*(page.by(name, "engine") for name in names)) or None


def first_token_s(page: MetricsPage) -> float | None:
    """The mean time to a first token since the start; None before the first."""
    turns = page.count(f"{FIRST_TOKEN}_count")
    return page.count(f"{FIRST_TOKEN}_sum") / turns if turns else None


def prompt_tokens(page: MetricsPage) -> dict[str, float]:
    """Prompt tokens by the source of their KV; none: computed."""
    return page.by("continuum_prompt_tokens_total", "tier")


def has_served_enough(page: MetricsPage) -> bool:
    """Whether enough turns have ended to judge shares of them."""
    return page.count(FINISHED) >= LEAST_TURNS


def off(page: MetricsPage) -> Iterator[Finding]:
    if not policy(page):
        yield warning(
            OFF,
            "this is stock vLLM: the server reports no continuum_policy_info",
            "to have continuum, start it with --scheduling-policy continuum (with VLLM_USE_RUST_FRONTEND it "
            "reports at another port: --metrics-port)",
        )


def store_down(page: MetricsPage) -> Iterator[Finding]:
    if min(page.values("continuum_tier_store_up"), default=1) < 1:
        yield error(
            "tier-store-down",
            "LMCache's server does not answer: what the GPU loses is computed again",
            "check that it runs and can be reached; serving continues meanwhile",
        )


def disk_faults(page: MetricsPage) -> Iterator[Finding]:
    faults = page.by("continuum_tier_faults_total", "fault")
    if damaged := faults.get("damaged_chunk", 0.0):
        yield warning(
            "damaged-chunks",
            f"{damaged:,.0f} chunks on LMCache's disk were damaged, or had no checksum: they were not used",
            "each file is named in LMCache's log; if files that it has written get damaged, replace the disk",
        )
    if failed := faults.get("failed_store", 0.0):
        yield warning(
            "failed-stores",
            f"LMCache could not store {failed:,.0f} chunks on its disk",
            "its log says why; a disk that is full needs a smaller LMCACHE_MAX_LOCAL_DISK_SIZE, or room",
        )


def low_batch(page: MetricsPage) -> Iterator[Finding]:
    """Memory is full while few turns run and others wait: memory limits this server, not compute."""
    running, waiting, usage = page.total(RUNNING), page.count(WAITING), kv_usage(page) or 0.0
    if running is None or running >= LOW_BATCH_TURNS or waiting < 1 or usage < MEMORY_FULL:
        return
    pinned = pinned_share(page)
    held = f", {pinned:.0%} of it by pins" if pinned else ""
    yield warning(
        "low-batch-memory-full",
        f"{running:.0f} turns run and {waiting:.0f} wait while {usage:.0%} of the KV cache is in use{held}",
        "give the KV cache more memory (--gpu-memory-utilization, tensor parallelism, --kv-cache-dtype fp8), "
        "or lower continuum.max_pinned_share if pins hold much of it",
    )


def preempting(page: MetricsPage) -> Iterator[Finding]:
    preemptions, finished = page.count(PREEMPTIONS), page.count(FINISHED)
    if has_served_enough(page) and preemptions > PREEMPTION_SHARE * finished:
        yield warning(
            "preemptions",
            f"{preemptions:,.0f} preemptions for {finished:,.0f} finished turns",
            "too many long contexts run at once: lower --max-num-seqs, or give the KV cache more memory",
        )


def small_tier(page: MetricsPage) -> Iterator[Finding]:
    largest = max(page.by("continuum_tier_capacity_tokens", "tier").values(), default=None)
    contexts = page.count("continuum_working_set_tokens")
    if largest is not None and largest < contexts:
        yield warning(
            "tier-too-small",
            f"the programs' contexts add up to {contexts:,.0f} tokens, and the largest tier "
            f"holds {largest:,.0f}",
            "it evicts KV before the program returns: give LMCache's server more DRAM "
            "(LMCACHE_MAX_LOCAL_CPU_SIZE, or its --l1-size-gb) or a disk",
        )


REMEDIES = {  # for prompts that change, by the third of the turn before in which they do
    "first": "text near the beginning is new in each prompt: send it last, or leave it out "
    "(a time; a list of tools; Claude Code: CLAUDE_CODE_ATTRIBUTION_HEADER=0)",
    "middle": "clients shorten or edit their histories: do that less often, and then by more",
    "last": "answers come back changed: send them back as they were, and serve with a chat template that "
    "keeps the model's thinking where the model allows it",
}


def lost_tokens(page: MetricsPage) -> dict[str, float]:
    """Tokens that returning programs had left and compute again, by cause and third."""
    return {cause: n for cause, n in page.by("continuum_lost_tokens_total", "cause").items() if n}


def changed_prompts(page: MetricsPage) -> Iterator[Finding]:
    computed = prompt_tokens(page).get("none", 0.0)
    for third, remedy in REMEDIES.items():
        lost = lost_tokens(page).get(f"changed-{third}-third", 0.0)
        if has_served_enough(page) and lost > LOST_SHARE * computed:
            yield warning(
                f"prompts-change-in-{third}-third",
                f"prompts differ from the turn before in its {third} third: {lost:,.0f} of {computed:,.0f} "
                "computed tokens were computed again",
                remedy,
            )


HONOURED = {  # by settings, if they are on
    "priority": "honor_priority",
    "program_turns": "honor_program_age",
    "program_age_s": "honor_program_age",
}


def ignored(page: MetricsPage) -> Iterator[Finding]:
    if found := {name: n for name, n in page.by("continuum_ignored_fields_total", "field").items() if n}:
        listed = ", ".join(f"{name} in {n:,.0f}" for name, n in sorted(found.items()))
        honoured = dict.fromkeys(HONOURED[field] for field in found if field in HONOURED)
        or_honour = f", or set continuum.{' and '.join(honoured)}" if honoured else ""
        yield note(
            "ignored-fields",
            f"fields of requests were ignored: {listed}",
            f"correct the client (docs/clients.md){or_honour}",
        )


def never_linked(page: MetricsPage) -> Iterator[Finding]:
    prompts = page.by("continuum_unnamed_prompts_total", "outcome")
    if prompts.get("first", 0.0) >= LEAST_TURNS and not prompts.get("linked"):
        yield note(
            "never-linked",
            f"none of {prompts['first']:,.0f} prompts without a program's name continued an earlier one",
            "nothing, if they are single questions; if they are agents' turns, name the program, or send "
            "histories back as they were (docs/clients.md)",
        )


def new_weights(page: MetricsPage) -> Iterator[Finding]:
    calls = {name: n for name, n in page.by("continuum_new_weights_total", "call").items() if n}
    if not calls:
        return
    times, is_up_s = sum(calls.values()), page.values("process_start_time_seconds")
    since = f" in {(time.time() - min(is_up_s)) / 60:,.0f} minutes" if is_up_s else ""
    is_often = has_served_enough(page) and times > NEW_WEIGHTS_SHARE * page.count(FINISHED)
    by = ", ".join(sorted(calls, key=lambda name: -calls[name]))
    yield (warning if is_often else note)(
        "new-weights",
        f"new weights {times:,.0f} times{since}, by {by}: each time all KV of before is lost",
        "nothing, if these calls change weights; name those that do not in continuum.reading_calls "
        "(docs/weight-updates.md)",
    )


RULES = (
    *(off, store_down, disk_faults, low_batch, preempting),
    *(small_tier, changed_prompts, ignored, never_linked, new_weights),
)


def diagnose(page: MetricsPage) -> list[Finding]:
    """All findings, in the order of RULES; [] if nothing is wrong, as far as the figures show."""
    return [finding for rule in RULES for finding in rule(page)]


def would_help(now: MetricsPage, before: MetricsPage | None = None) -> tuple[str, str]:
    """Whether continuum would speed up agents on this stock server: yes, little, no, or too early to tell;
    and because of what. Counts are since `before` (None: the start); of two states the fuller one counts."""

    def grown(name: str) -> float:
        return now.count(name) - (before.count(name) if before else 0.0)

    looks, turns, preempted = [now, before or now], grown(FINISHED), grown(PREEMPTIONS)
    if turns < LEAST_TURNS:
        return (
            "too early to tell",
            f"{counted(turns, 'turn')} ended, and fewer than {LEAST_TURNS:.0f} say nothing",
        )
    usage = max(kv_usage(look) or 0.0 for look in looks)
    waiting = max(look.count(WAITING) for look in looks)
    queried = grown(QUERIED)
    found = sum(map(grown, FOUND)) / queried if queried else 0.0
    state = (
        f"{usage:.0%} of the KV cache is in use, {counted(waiting, 'turn')} waiting, "
        f"{counted(preempted, 'preemption')} for {counted(turns, 'turn')}, and "
        f"{found:.0%} of the prompt tokens were found in the caches"
    )
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


def summary(page: MetricsPage) -> str:
    """Whether continuum is on, and what it brings."""
    if not (name := policy(page)):
        return "continuum is NOT on here. Would it help? {}: {}.".format(*would_help(page))
    parts = [f"continuum is on: policy {name}, {counted(page.count('continuum_programs'), 'program')} known."]
    tokens = prompt_tokens(page)
    if total := sum(tokens.values()):
        shares = (f"{n / total:.0%} {'computed' if tier == 'none' else tier}" for tier, n in tokens.items())
        parts.append(f"Prompt tokens by the source of their KV: {', '.join(shares)}.")
    pins = page.by("continuum_pins_total", "outcome")
    parts.append(f"Pins: {pins.get('taken', 0):,.0f} taken, {pins.get('reused', 0):,.0f} reused.")
    decisions = page.by("continuum_ttl_decisions_total", "reason")
    if decisions and not pins.get("taken"):
        reason = max(decisions, key=lambda each: decisions[each]).removesuffix(NO_PIN)
        parts.append(f"No turn was pinned: {WHY_NOT_PINNED.get(reason, reason)}.")
    if (first_s := first_token_s(page)) is not None:
        parts.append(f"First tokens came after {first_s:.3g} s on average.")
    return " ".join(parts)
