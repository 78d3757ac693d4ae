"""The policies that `continuum` is compared with, as TTLs on the same scheduler, and its ablations.

    CONTINUUM_POLICY=experiments.policies:plas vllm serve ... --scheduling-policy continuum

In experiments each has its contender's name (`setting`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import NormalDist

from continuum_lmcache.policy import continuum
from continuum_lmcache.policy.interface import EngineState, Order, Places, Policy
from continuum_lmcache.policy.named import POLICIES, policy_named
from continuum_lmcache.policy.published import order as pinned_first
from continuum_lmcache.policy.ttl_solver import best_ttl, retention_of
from continuum_lmcache.tools.distribution import DurationDistribution
from continuum_lmcache.tools.durations import ToolDurations
from continuum_lmcache.tools.shell_key import INSTANT, PLAIN, SLOW
from continuum_lmcache.types import FinishedTurn, Place, QueueEntry, Retention, ToolKey

MEAN_THRESHOLD_S = 2.0  # FIXED_THRESHOLD_CONTINUUM of github.com/Hanchenli/vllm-continuum
FAST_TTL_S = 2.0
FAST_TOOLS = PLAIN | INSTANT | frozenset(("Read", "Glob", "Grep", "Edit", "Write", "TodoWrite"))
SLOW_TOOLS = SLOW | frozenset(("Task", "WebSearch", "WebFetch"))
POSTERIOR_SAMPLES = 3  # below this a key's posterior is mostly the prior's
PLAS_QUANTUM_TOKENS = 2048  # the first queue's width: one prefill step of vLLM's default budget
PLAS_AGEING_S = 30.0  # a wait of this length makes up for one queue


def no_retention(_turn: FinishedTurn, _state: EngineState) -> Retention:
    """Never pin: what vLLM does."""
    return Retention(0.0, "never")


def mean_threshold_ttl(turn: FinishedTurn, state: EngineState) -> Retention:
    """The public prototype: pin for 2 s if the command's mean gap is at most 2 s, or not known yet.

    It keys by the command's first word, so only the command's level is looked up, without arguments.
    """
    seen = state.gaps.exact(turn.tool[-2:])
    mean_s = seen.mean_s
    ttl_s = MEAN_THRESHOLD_S if mean_s is None or mean_s <= MEAN_THRESHOLD_S else 0.0
    reason = "no-history" if mean_s is None else "mean"
    return retention_of(seen, ttl_s, 0.0, reason)


def infercept_ttl(turn: FinishedTurn, state: EngineState) -> Retention:
    """InferCept (arXiv 2402.01869): the least waste of preserve, swap and discard, as a TTL.

    Waste is memory x time. Preserving wastes the turn's own memory while the tool runs. Discarding wastes
    all of the batch's memory while the context is recomputed, swapping while it goes out and comes back.
    How long the tool will run is not known. So the pin lasts until preserving has wasted as much as the
    better of the other two would: tau * own = min(discard, 2 swap) * batch.
    """
    where, costs = turn.residency, state.costs
    discard_s = costs.prefill_s(where.total_tokens - where.gpu_tokens, where.gpu_tokens)
    swap_s = 2 * costs.reload_s(where)
    batch = max(state.total_blocks - state.free_blocks - state.pinned_blocks, turn.blocks)
    ttl_s = min(min(discard_s, swap_s) * batch / max(turn.blocks, 1), state.config.max_ttl_s)
    seen = state.gaps.distribution(turn.tool)
    return retention_of(seen, ttl_s, min(discard_s, swap_s), "min-waste")


def three_way_ttl(turn: FinishedTurn, state: EngineState) -> Retention:
    """ContextServe's three estimates of a gap: a rule, the posterior of the key's own gaps, the CDF.

    A tool known to be FAST is pinned for 2 s and a SLOW one is not. Else eq. 2 is solved: with the
    key's posterior where the key has enough gaps, else with the recorded CDF.
    """
    program = turn.tool[-2:][:1]
    if program and program[0] in FAST_TOOLS | SLOW_TOOLS:
        ttl_s = FAST_TTL_S if program[0] in FAST_TOOLS else 0.0
        return Retention(ttl_s, "rule", cost_s=ttl_s, level="rule")
    benefit_s = state.queue_delay_s * state.eta + state.reload_s
    own = state.gaps.exact(most_specific(turn.tool, state.gaps))
    if len(own.samples_s) >= POSTERIOR_SAMPLES:
        seen = as_posterior(own)
        return retention_of(seen, best_ttl(seen, benefit_s, state.config.max_ttl_s), benefit_s, "posterior")
    seen = state.gaps.distribution(turn.tool)
    return retention_of(seen, best_ttl(seen, benefit_s, state.config.max_ttl_s), benefit_s, "cdf")


def most_specific(tool: ToolKey, gaps: ToolDurations) -> ToolKey:
    """The finest level with enough gaps for a posterior; the key itself if none has."""
    finest = (tool[at:] for at in range(len(tool)))
    return next((k for k in finest if len(gaps.exact(k).samples_s) >= POSTERIOR_SAMPLES), tool)


def as_posterior(own: DurationDistribution) -> DurationDistribution:
    """The same gaps, with P from a Normal-Inverse-Gamma posterior of the mean and variance of log gap.

    Prior (mean 0, i.e. 1 s; weight 1; shape 2; scale 2): the predictive is Student's t with 4 + n
    degrees of freedom. A normal of the same variance stands in for it (the standard library has no
    t distribution): at n >= 3 the two CDFs differ by less than 0.03.
    """
    logs = [math.log(max(gap_s, 1e-3)) for gap_s in own.samples_s]
    n, mean = len(logs), sum(logs) / len(logs)
    weight, shape = 1.0 + n, 2.0 + n / 2
    scale = 2.0 + sum((x - mean) ** 2 for x in logs) / 2 + n * mean * mean / (2 * weight)
    variance = scale * (weight + 1) / ((shape - 1) * weight)
    predictive = NormalDist(n * mean / weight, math.sqrt(variance))
    return DurationDistribution("posterior", own.samples_s, tuple(map(predictive.cdf, logs)), own.n)


def turn_order(entry: QueueEntry) -> Order:
    """vLLM's fcfs: preempted turns at the front, then by arrival. It ignores the client's priority."""
    return (not entry.preempted, entry.turn_arrival_s)


def program_order(entry: QueueEntry) -> Order:
    """A program keeps its place across its turns; the client's priority comes first."""
    return (
        entry.priority,
        not entry.preempted,
        entry.program_arrival_s,
        entry.turn_arrival_s,
    )


def least_attained_service(entry: QueueEntry) -> Order:
    """Autellix's PLAS (arXiv 2502.13965): the program with the least service goes first.

    Queues double in width: queue 0 up to PLAS_QUANTUM_TOKENS of service, queue 1 up to twice that,
    and so on; arrival decides within one. Autellix moves a turn to the first queue once its
    program's waiting is a multiple of its service. That needs a clock, so ageing replaces it:
    a turn rises by one queue for every PLAS_AGEING_S it has waited longer than another. At one
    moment waits differ by arrivals only, so the order does not depend on the moment. No turn that arrives
    more than q x PLAS_AGEING_S after a turn in queue q overtakes it.
    """
    queue = (entry.attained_tokens // PLAS_QUANTUM_TOKENS).bit_length()
    return (
        entry.priority,
        not entry.preempted,
        entry.turn_arrival_s + queue * PLAS_AGEING_S,
        entry.program_arrival_s,
    )


TO_LOAD = continuum.to_load
fcfs = Policy(no_retention, turn_order, to_load=TO_LOAD)
program_fcfs = Policy(no_retention, program_order, to_load=TO_LOAD)
mean_threshold = Policy(mean_threshold_ttl, pinned_first, to_load=TO_LOAD)
plas = Policy(no_retention, least_attained_service, to_load=TO_LOAD)
infercept = Policy(infercept_ttl, program_order, to_load=TO_LOAD)
three_way = Policy(three_way_ttl, pinned_first, to_load=TO_LOAD)
no_pins = replace(POLICIES["continuum"], retain=no_retention)
always_loads = Policy(POLICIES["static-ttl"].retain, pinned_first)  # exactness.py's

BASELINES = ("fcfs", "program-fcfs", "mean-threshold", "plas", "infercept", "three-way", "no-pins")


def known() -> list[str]:
    """The short names of all policies."""
    return [*BASELINES, *POLICIES]


def setting(name: str) -> str:
    """The value of `continuum.policy` for a contender's short name."""
    return f"{__name__}:{name.replace('-', '_')}" if name in BASELINES else name


def full_price(policy: Policy) -> Policy:
    """A second of a pin costs one always, so its TTL is decided once."""

    def retain(turn: FinishedTurn, state: EngineState) -> Retention:
        return replace(policy.retain(turn, replace(state, is_memory_short=True)), asks_again=False)

    return replace(policy, retain=retain)


def all_ends_alike(policy: Policy) -> Policy:
    """Nothing is evicted first, and who may not come back is expected like others."""
    decide = policy.gives_up_place
    if decide is None or policy.retain is not continuum.retain:
        return replace(policy, evicts_first=None)

    def place(turn: FinishedTurn, state: EngineState, places: Places) -> Place:
        return decide(turn, state, places)._replace(expected_s=state.expected_s)

    return replace(policy, retain=continuum.solved, gives_up_place=place, evicts_first=None)


SWITCHES: dict[str, Callable[[Policy], Policy]] = {
    "admission": lambda policy: replace(policy, may_start=None, gives_up_place=None),
    "evict_ended_programs": all_ends_alike,
    "priced_pins": full_price,
    "measured_chunk": lambda policy: replace(policy, chunk=None),
    "load_or_recompute": lambda policy: replace(policy, to_load=None),
    "pins": lambda policy: replace(policy, retain=no_retention),
}


def without(name: str, *switches: str) -> Policy:
    """The policy of that short name with these of SWITCHES off. Raises KeyError for unknown ones."""
    policy = policy_named(setting(name))
    for switch in sorted(switches):  # evict_ended_programs before priced_pins
        policy = SWITCHES[switch](policy)
    return policy


@contextmanager
def registered(name: str, policy: Policy) -> Iterator[None]:
    """Within the block, `name` is a policy's name."""
    POLICIES[name] = policy
    try:
        yield
    finally:
        del POLICIES[name]
