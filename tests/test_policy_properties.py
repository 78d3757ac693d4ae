"""Properties of eq. 2's solution for all gaps, benefits and ceilings."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from test_policies import A_SECOND_A_TOKEN, SHORT, decide, learned, turn

from continuum_lmcache.policy.continuum import IDLE_PRICE
from continuum_lmcache.policy.named import policy_named
from continuum_lmcache.policy.ttl_solver import PART, best_ttl
from continuum_lmcache.tools.distribution import DurationDistribution, equal_steps
from continuum_lmcache.tools.durations import SHORTEST_GAP_S
from continuum_lmcache.types import QueueEntry
from experiments.policies import known, setting

# Small whole numbers beside any, so that near ties and the edges of eq. 2 come up often.
GAPS_S = st.lists(st.integers(1, 20).map(float) | st.floats(SHORTEST_GAP_S, 1000.0), max_size=40).map(sorted)
BENEFITS_S = st.floats(0.0, 4.0) | st.integers(0, 60).map(float) | st.floats(-100.0, 10_000.0)
CEILINGS_S = st.floats(0.0, 2000.0)
SLACK = 1e-9  # two candidates can be equal but for rounding


@st.composite
def distributions(draw):
    ended_s = draw(GAPS_S)
    cold = draw(st.booleans())
    if cold:
        return DurationDistribution("cold", (), (), 0)
    observed = len(ended_s) + draw(st.integers(0, 40))
    return DurationDistribution("all", tuple(ended_s), equal_steps(len(ended_s), observed), observed)


def gain_s(seen, benefit_s, ttl_s):
    """What eq. 2 maximises. A TTL of 0 is no pin, and gains nothing."""
    return seen.probability(ttl_s) * benefit_s - ttl_s if ttl_s > 0 else 0.0


@given(distributions(), BENEFITS_S, CEILINGS_S, st.lists(st.floats(0.001, 1.0), max_size=20))
def test_no_other_ttl_beats_the_chosen_one(seen, benefit_s, ceiling_s, shares):
    best_s = best_ttl(seen, benefit_s, ceiling_s)
    assert 0.0 <= best_s <= ceiling_s
    others = [*(t for t in seen.samples_s if t <= ceiling_s), *(s * ceiling_s for s in shares), ceiling_s]
    achieved = gain_s(seen, benefit_s, best_s)
    assert achieved >= max(gain_s(seen, benefit_s, t) for t in others) - SLACK * (1 + abs(benefit_s))


@given(
    st.lists(st.integers(1, 60).map(float) | st.floats(0.001, 60.0), max_size=5 * PART).map(sorted),
    st.integers(0, 40),
    BENEFITS_S,
    CEILINGS_S,
    st.sampled_from((IDLE_PRICE, 1.0)),
)
def test_the_chosen_ttl_is_the_one_that_a_look_at_every_gap_finds(ended_s, lost, benefit_s, ceiling_s, price):
    observed = len(ended_s) + lost
    seen = DurationDistribution("all", tuple(ended_s), equal_steps(len(ended_s), observed), observed)
    allowed = [
        (p * benefit_s - price * t, -t) for t, p in zip(ended_s, seen.cdf, strict=True) if t <= ceiling_s
    ]
    assert best_ttl(seen, benefit_s, ceiling_s, price) == -max([(0.0, -0.0), *allowed])[1]


@given(st.integers(0, 2000), st.integers(0, 2000), st.booleans())
def test_a_dearer_reload_never_shortens_the_ttl(reload_s, more_s, cold):
    gaps = None if cold else learned()
    cheap, dear = (decide("continuum", turn(s), gaps) for s in (reload_s, reload_s + more_s))
    assert dear.ttl_s >= cheap.ttl_s


@given(st.floats(-1.0, 1.0), st.booleans(), st.integers(0, 10_000))
def test_nothing_is_pinned_that_costs_nothing_to_lose(eta, cold, tokens):
    gaps = None if cold else learned()
    state = replace(SHORT, queue_delay_s=0.0, eta=eta)
    keep = decide("continuum", turn(tokens, gpu_tokens=tokens), gaps, state)
    assert (keep.ttl_s, keep.benefit_s) == (0.0, 0.0)


@given(st.integers(0, 500), st.integers(0, 500))
def test_what_lies_in_a_tier_is_never_pinned_longer_than_what_lies_nowhere(dram_tokens, rest_tokens):
    total = dram_tokens + rest_tokens
    nowhere, in_dram = turn(total), turn(total, dram_tokens=dram_tokens)
    assert decide("continuum", in_dram, learned()).ttl_s <= decide("continuum", nowhere, learned()).ttl_s
    assert A_SECOND_A_TOKEN.reload_s(in_dram.residency) <= A_SECOND_A_TOKEN.reload_s(nowhere.residency)


STANDINGS = st.builds(
    QueueEntry,
    preempted=st.booleans(),
    pinned=st.booleans(),
    priority=st.integers(-3, 3),
    program_arrival_s=st.floats(0, 1e6),
    turn_arrival_s=st.floats(0, 1e6),
    program_order_s=st.floats(0, 1e6),
    attained_tokens=st.integers(0, 10**7),
)


@given(st.sampled_from(known()), STANDINGS, st.floats(0, 1e6))
def test_waiting_longer_never_sends_a_turn_back(policy, waiting, earlier_s):
    order = policy_named(setting(policy)).order
    earlier = replace(
        waiting,
        turn_arrival_s=min(waiting.turn_arrival_s, earlier_s),
        program_arrival_s=min(waiting.program_arrival_s, earlier_s),
        program_order_s=min(waiting.program_order_s, earlier_s),
    )
    assert order(earlier) <= order(waiting)
