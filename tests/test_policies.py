"""Each policy's decisions, by worked examples."""

import math
import re
from dataclasses import replace

import pytest
from admission_rig import a_state

from continuum_lmcache.config import ContinuumConfig
from continuum_lmcache.errors import ConfigError
from continuum_lmcache.policy.interface import FirstInLine, Line, Policy, Room
from continuum_lmcache.policy.named import POLICIES, policy_named
from continuum_lmcache.reload.cost_model import CostModel, PrefillCurve, TransferRate
from continuum_lmcache.tools.durations import ToolDurations
from continuum_lmcache.types import FinishedTurn, Place, ProgramId, QueueEntry, Residency
from experiments.policies import known, setting

MAKE = ("make all", "make", "bash")
A_SECOND_A_TOKEN = CostModel(
    prefill=PrefillCurve(fixed_s=0.0, per_token_s=1.0, per_pair_s=0.0, samples=1),
    dram=TransferRate(bytes_per_s=10.0, fixed_s=0.0, samples=1),
    ssd=TransferRate(bytes_per_s=1.0, fixed_s=0.0, samples=1),
    kv_bytes_per_token=1,
    chunk_tokens=1,
)
SHORT = a_state(is_memory_short=True)  # so a second of pin costs one


def turn(reload_s, tool=MAKE, **residency):
    """A turn of 10 blocks whose context costs `reload_s` to compute again, if no tier has it."""
    where = replace(Residency(0, 0, 0, total_tokens=reload_s), **residency)
    return FinishedTurn(ProgramId("p"), 1, tool, where.total_tokens, 10, where)


def learned(tool=MAKE):
    """110 gaps: 60 of 1 s, 30 of 4 s, 20 of 30 s."""
    gaps = ToolDurations()
    for gap_s in [1.0] * 60 + [4.0] * 30 + [30.0] * 20:
        gaps.observe(tool, gap_s)
    return gaps


def decide(policy, turn, gaps=None, state=SHORT, costs=A_SECOND_A_TOKEN, **settings):
    config, gaps = ContinuumConfig(policy=policy, **settings), gaps or ToolDurations()
    lost_share, reload_s = gaps.longer_share(turn.tool, math.inf), costs.reload_s(turn.residency)
    state = replace(state, config=config, costs=costs, gaps=gaps, lost_share=lost_share, reload_s=reload_s)
    return policy_named(setting(policy)).retain(turn, state)


def standing(**changes):
    base = QueueEntry(
        preempted=False,
        pinned=False,
        priority=0,
        program_arrival_s=100.0,
        turn_arrival_s=200.0,
        program_order_s=100.0,
        attained_tokens=0,
    )
    return replace(base, **changes)


def first_of(policy, *waiting):
    return min(waiting, key=policy_named(setting(policy)).order)


@pytest.mark.parametrize(("reload_s", "ttl_s", "probability"), [(6, 1.0, 60 / 110), (13, 4.0, 90 / 110)])
def test_continuum_solves_equation_2_as_by_hand(reload_s, ttl_s, probability):
    """T = 2 s, eta = 1/2, so the benefit is 1 + PrefillReload.

    Reload 6 s, benefit 7: tau 1 gains 7 * 60/110 - 1 = 2.82, tau 4 gains 7 * 90/110 - 4 = 1.73,
    tau 30 gains 7 - 30 < 0. So tau* = 1.
    Reload 13 s, benefit 14: 14 * 60/110 - 1 = 6.64, 14 * 90/110 - 4 = 7.45, 14 - 30 < 0. tau* = 4.
    """
    state = replace(SHORT, queue_delay_s=2.0, eta=0.5)
    keep = decide("continuum", turn(reload_s), learned(), state)
    assert keep.ttl_s == ttl_s
    assert keep.probability == pytest.approx(probability)
    assert keep.benefit_s == pytest.approx(1.0 + reload_s)
    assert (keep.reason, keep.cost_s, keep.samples, keep.level) == ("cdf", ttl_s, 110, "tool:3")


def test_continuum_pins_shorter_where_a_tier_reloads_cheaply():
    """40 tokens nowhere: reload 40 s, tau 30 gains 10, tau 4 gains 28.7 and wins over tau 1, 20.8.

    In DRAM they cost 4 s: tau 1 gains 1.18, tau 4 loses. On disk 44 s to read and copy, so they are
    computed for 40 s, as if they lay nowhere. On the GPU they cost nothing: no pin.
    """
    assert decide("continuum", turn(40), learned()).ttl_s == 4.0
    assert decide("continuum", turn(40, dram_tokens=40), learned()).ttl_s == 1.0
    assert decide("continuum", turn(40, ssd_tokens=40), learned()).ttl_s == 4.0
    assert decide("continuum", turn(40, gpu_tokens=40), learned()).ttl_s == 0.0


def test_of_two_ttls_that_pay_the_same_the_shorter_one_is_taken():
    """55 gaps of 1 s and 55 of 2 s, benefit 2: tau 1 gains 2 / 2 - 1, tau 2 gains 2 - 2: nothing."""
    gaps = ToolDurations()
    for gap_s in [1.0, 2.0] * 55:
        gaps.observe(MAKE, gap_s)
    assert decide("continuum", turn(2), gaps).ttl_s == 0.0


@pytest.mark.parametrize(("benefit_s", "ttl_s"), [(0, 0.0), (1, 0.0), (2, math.log(2)), (8, math.log(8))])
def test_while_cold_continuum_pins_for_the_log_of_the_benefit(benefit_s, ttl_s):
    """(1 - exp(-tau)) * b - tau is steepest at 0 with b - 1 and flat at ln b. eta counts as 1."""
    half = replace(SHORT, queue_delay_s=benefit_s / 2, eta=-1.0)
    keep = decide("continuum", turn(benefit_s / 2), state=half)
    assert keep.ttl_s == pytest.approx(ttl_s)
    assert keep.probability == pytest.approx(1 - math.exp(-ttl_s))
    assert (keep.reason, keep.level, keep.samples) == ("cold-start", "cold", 0)


@pytest.mark.parametrize("policy", ["fcfs", "program-fcfs", "plas"])
def test_policies_without_pins_never_pin(policy):
    keep = decide(policy, turn(1000), learned())
    assert (keep.ttl_s, keep.reason) == (0.0, "never")


def test_mean_threshold_pins_two_seconds_for_a_command_that_takes_two_on_average():
    gaps = ToolDurations()
    assert decide("mean-threshold", turn(5), gaps).ttl_s == 2.0
    gaps.observe(("make test", "make", "bash"), 1.0)
    gaps.observe(MAKE, 3.0)
    assert decide("mean-threshold", turn(5), gaps).ttl_s == 2.0
    gaps.observe(MAKE, 3.0)
    assert decide("mean-threshold", turn(5), gaps).ttl_s == 0.0


def test_infercept_preserves_until_that_wastes_as_much_as_the_better_alternative():
    """30 of 100 blocks run, 10 of them this turn's: the batch weighs 3 times the turn.

    40 tokens nowhere: discarding costs 40 s of the batch, so 120 s of the turn's own memory.
    In DRAM: swapping costs 2 * 4 s of the batch, 24 s of its own.
    """
    assert decide("infercept", turn(40)).ttl_s == pytest.approx(120.0)
    assert decide("infercept", turn(40, dram_tokens=40)).ttl_s == pytest.approx(24.0)
    assert decide("infercept", turn(40), max_ttl_s=50.0).ttl_s == 50.0


def test_three_way_uses_a_keys_own_few_gaps_and_else_those_of_all_tools():
    gaps = ToolDurations()
    tool = ("train.sh", "bash")
    assert decide("three-way", turn(100, tool), gaps).reason == "cdf"
    for gap_s in (4.0, 5.0, 6.0):
        gaps.observe(tool, gap_s)
    keep = decide("three-way", turn(100, tool), gaps)
    assert (keep.ttl_s, keep.reason, keep.samples) == (6.0, "posterior", 3)
    assert 0.5 < keep.probability < 0.95


def test_fcfs_orders_by_the_turns_arrival_and_nothing_else():
    early = standing(turn_arrival_s=1.0, program_arrival_s=9.0, priority=5)
    pinned = standing(turn_arrival_s=2.0, pinned=True, priority=-1)
    preempted = standing(turn_arrival_s=3.0, preempted=True)
    assert first_of("fcfs", early, pinned) is early
    assert first_of("fcfs", early, preempted) is preempted


def test_continuum_orders_by_priority_then_preemption_then_pin_then_place():
    rising = [
        standing(priority=-1, program_order_s=9.0),
        standing(preempted=True, program_order_s=8.0),
        standing(pinned=True, program_order_s=7.0),
        standing(program_order_s=5.0),
        standing(program_order_s=6.0),
    ]
    falling = list(reversed(rising))
    assert sorted(falling, key=POLICIES["continuum"].order) == rising


def test_plas_serves_the_program_that_was_served_least():
    served = standing(attained_tokens=70_000, program_arrival_s=1.0)
    fresh = standing(attained_tokens=0, program_arrival_s=2.0, turn_arrival_s=201.0)
    assert first_of("plas", served, fresh) is fresh


def test_plas_lets_no_turn_starve():
    """70,000 tokens are queue 6, so 6 * 30 s of patience make up for them."""
    served = standing(attained_tokens=70_000)
    assert first_of("plas", served, standing(turn_arrival_s=200.0 + 179.0)) is not served
    assert first_of("plas", served, standing(turn_arrival_s=200.0 + 181.0)) is served


@pytest.mark.parametrize("name", known())
def test_every_policy_answers_whatever_it_is_asked(name):
    for reload_s in (0, 1, 10**6):
        for tool in ((), MAKE, ("Read",)):
            for gaps in (ToolDurations(), learned(tool)):
                keep = decide(name, turn(reload_s, tool), gaps)
                assert 0.0 <= keep.ttl_s < math.inf
                assert 0.0 <= keep.probability <= 1.0
                assert keep.reason


def test_an_unknown_policy_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"'continum'; did you mean 'continuum'\? Known: continuum, "):
        policy_named("continum")
    with pytest.raises(ConfigError, match="'quick_tools.quick'; Known: .*; one of your own is module:name"):
        policy_named("quick_tools.quick")


def test_a_policy_of_ones_own_is_named_by_its_module(monkeypatch, tmp_path):
    (tmp_path / "own_policies.py").write_text(
        "from experiments.policies import Policy, pinned_first, plas\nwords = 'none'\n"
        "four, two = Policy(lambda a: None, max), Policy(plas.retain, lambda a, b: (0.0,))\n"
        "none = Policy(plas.retain, None)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert isinstance(policy_named("own_policies:plas"), Policy)
    for name, why in (
        ("no_such_module:plas", "No module named 'no_such_module'; it must be module:name"),
        ("own_policies:plus", "has no attribute 'plus'; it must be module:name"),
        ("own_policies:", "a module; it must be a Policy"),
        ("own policies:plas", "invalid format"),
        ("own_policies:words", "a str; it must be a Policy"),
        ("own_policies:four", r"too many positional .*retain must take \(turn, state\)"),
        ("own_policies:two", r"missing a required argument: 'b'; its order must take \(entry\)"),
        ("own_policies:none", r"None is not a callable object; its order must take \(entry\)"),
    ):
        with pytest.raises(ConfigError, match=f"continuum.policy is '{name}'.*{why}"):
            policy_named(name)


WRONG = {
    "retain": ("turn, state", ["2.5", "None", *(f"kept({ttl})" for ttl in ("nan", "inf", "-1.0", "None"))]),
    "order": ("entry", ["1.0", "(nan,)", "('first',)"]),
    "may_start": ("first, room", ["True", "None", "Start('no', 'why', 0, 0)"]),
    "gives_up_place": (
        "turn, state, places",
        ["False", *(f"Place({it})" for it in ("1, 'why', 1.0", "True, 7, 1.0", "True, 'why', -1.0"))]
        + ["Place(True, 'why', nan)"],
    ),
    "chunk": ("step", ["512", "Chunk(0, 'why')", "Chunk(1.5, 'why')"]),
    "to_load": (
        "where, state",
        ["0", "LoadChoice('load', 30)"]
        + [f"LoadChoice(LoadReason.LOAD, {it})" for it in ("31", "-1", "30.0", "30, nan", "30, 0.0, nan")],
    ),
    "evicts_first": ("end", ["True", "None", "Eviction('no', 'why')"]),
    "longest_wait_s": ("line", ["None", "nan", "-1.0"]),
}


@pytest.mark.parametrize(
    ("function", "answer"), [(f, a) for f, (_, answers) in WRONG.items() for a in answers]
)
def test_a_wrong_answer_of_a_policy_of_ones_own_is_refused_in_a_sentence(
    function, answer, monkeypatch, tmp_path
):
    """A TTL of nan would make a pin that never expires."""
    name = "bad_" + re.sub(r"\W", "_", f"{function} {answer}")
    (tmp_path / f"{name}.py").write_text(
        "from dataclasses import replace\nfrom math import inf, nan\n"
        "from continuum_lmcache.policy.continuum import *\n"
        "def kept(ttl_s): return Retention(ttl_s, 'own')\n"
        f"own = replace(continuum, {function}=lambda {WRONG[function][0]}: {answer})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    where = Residency(0, 10, 20, 40)
    asked = [where if word == "where" else None for word in WRONG[function][0].split(", ")]
    with pytest.raises(ConfigError, match=f"'{name}:own': {function} answered .*; it must be a.*asked of"):
        getattr(policy_named(f"{name}:own"), function)(*asked)


def test_right_answers_pass_as_they_are(monkeypatch, tmp_path):
    (tmp_path / "right_policy.py").write_text("from continuum_lmcache.policy.continuum import continuum\n")
    monkeypatch.syspath_prepend(tmp_path)
    own = policy_named("right_policy:continuum")
    assert decide("continuum", turn(40), learned()) == decide("right_policy:continuum", turn(40), learned())
    assert own.order(standing()) == POLICIES["continuum"].order(standing())
    idle = Room(ContinuumConfig(), 0.0, 0, 0.0, 0.0, 0, True, 0.0, Place(True, "", 0.0))
    assert own.may_start(FirstInLine(10.0, 0.0, False, 0), idle).reason == "idle"
    line = Line(ContinuumConfig(longest_wait_s=10.0), 1, 1, 1, False, 2.0, 1.0)
    assert own.longest_wait_s(line) == 2 * 6.0
