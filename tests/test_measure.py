"""profiles/measure.py in parts: fits of known curves, timings in turns, disk and copies, the report."""

import itertools
import random
import subprocess
import sys
from dataclasses import replace

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("scipy")
torch = pytest.importorskip("torch")

from continuum_lmcache.errors import ProfileError  # noqa: E402
from continuum_lmcache.reload.cost_model import CostModel  # noqa: E402
from profiles import disk_timing  # noqa: E402
from profiles.engine_timing import KvShape  # noqa: E402
from profiles.fit import fit_load, fit_prefill, fit_step, refuse_poor  # noqa: E402
from profiles.report import Measured, points, profile_of  # noqa: E402
from profiles.timing import Budget, in_turns, time_moves  # noqa: E402

GRID = [(n, c) for n in (128, 512, 2048, 8192) for c in (0, 1024, 16384)]
SHAPE = KvShape(layers=2, bytes_per_token=2 * 2 * 2 * 64 * 2, block_tokens=128, dtype=torch.bfloat16)
CHUNK_BYTES = 256 * SHAPE.bytes_per_token
COUNTS = (1, 2, 4, 8)


def prefill_s(n, c, fixed_s=0.01, per_token_s=1e-4, per_pair_s=1e-8):
    return fixed_s + per_token_s * n + per_pair_s * (n * c + n * n / 2)


def no_tick():
    pass


def measured(noise=0.0, rate=1e9):
    """Timings of a machine whose curves are known."""
    draw = random.Random(1)

    def samples(seconds):
        return [seconds * (1 + draw.uniform(-noise, noise)) for _ in range(3)]

    moves = {
        (way, n): samples(0.001 + n * CHUNK_BYTES / rate)
        for way, rate in (("load", rate), ("store", rate / 2))
        for n in COUNTS
    }
    steps = {
        (n, c, b): samples(0.01 + 1e-4 * n + 1e-3 * b) for n in (0, 128) for c in (256, 512) for b in (1, 4)
    }
    return Measured(SHAPE, {p: samples(prefill_s(*p)) for p in GRID}, steps, moves, moves, 4096)


H200_PREFILLS = {  # measured, Llama 3.1 8B's shape: {(tokens, context tokens): seconds}
    (128, 0): 0.018479,
    (128, 4096): 0.019389,
    (128, 16384): 0.020228,
    (512, 0): 0.016972,
    (512, 4096): 0.016732,
    (512, 16384): 0.022512,
    (2048, 0): 0.045196,
    (2048, 4096): 0.056945,
    (2048, 16384): 0.080334,
    (8192, 0): 0.2091,
    (8192, 4096): 0.23634,
    (8192, 16384): 0.33414,
}


def test_a_gpus_short_prefills_which_all_take_alike_do_not_bend_the_curve():
    fit = fit_prefill(H200_PREFILLS)
    assert fit.r2 > 0.998
    longer = [off for (n, _), off in zip(H200_PREFILLS, fit.residuals, strict=True) if n >= 2048]
    assert max(map(abs, longer)) < 0.15


@given(st.floats(0, 1), st.floats(1e-6, 1e-2), st.floats(0, 1e-6))
def test_a_prefill_fit_finds_the_curve_behind_its_timings(fixed_s, per_token_s, per_pair_s):
    curve = {p: prefill_s(*p, fixed_s, per_token_s, per_pair_s) for p in GRID}
    fit = fit_prefill(curve)
    for (n, c), seconds in curve.items():
        assert prefill_s(n, c, **fit.terms) == pytest.approx(seconds, rel=1e-3)
    assert fit.r2 > 0.999


@given(st.floats(1e6, 1e12), st.floats(0, 0.1))
def test_a_load_fit_finds_rate_and_latency(bytes_per_s, fixed_s):
    sizes = [2**power for power in range(16, 30, 2)]
    fit = fit_load({size: fixed_s + size / bytes_per_s for size in sizes})
    for size in sizes:
        said_s = fit.terms["fixed_s"] + size * fit.terms["s_per_byte"]
        assert said_s == pytest.approx(fixed_s + size / bytes_per_s, rel=1e-3)


@pytest.mark.parametrize("floor", [0, 128])
def test_a_step_fit_finds_the_weights_floor_and_every_coefficient(floor):
    points = list(itertools.product((0, 64, 128, 512, 2048), (256, 4096), (1, 8)))
    truth = {
        (n, c, b): 0.004
        + 1e-4 * (b + (n > 0))
        + 5e-5 * max(floor, n + b)
        + 4e-9 * (n * c + n * n / 2)
        + 8e-8 * b * c
        for n, c, b in points
    }
    terms = fit_step(truth).terms
    assert terms["least_linear_s"] == pytest.approx(5e-5 * floor)
    found = [terms[name] for name in ("fixed_s", "per_token_s", "per_pair_s", "per_cached_token_s")]
    assert found == pytest.approx([0.004, 5e-5, 4e-9, 8e-8], rel=0.02)


@pytest.mark.parametrize(("points", "says"), [({(1, 0): 1.0}, "1 points cannot fix"), ({}, "0 points")])
def test_too_few_points_are_refused_with_what_to_do(points, says):
    with pytest.raises(ProfileError, match=says):
        fit_prefill(points)


def test_a_poor_fit_is_refused_unless_forced():
    draw = random.Random(0)
    fit = fit_prefill({p: draw.uniform(0.1, 1.0) for p in GRID})
    assert fit.r2 < 0.98
    with pytest.raises(ProfileError, match=r"prefill: R2 is .* under 0.98; .* --force"):
        refuse_poor(fit, "prefill", force=False)
    refuse_poor(fit, "prefill", force=True)


class Machine:
    """Points that take a second each, on a simulated clock."""

    def __init__(self):
        self.now_s = 0.0
        self.ran = []

    def run(self, point):
        self.ran.append(point)
        self.now_s += 1.0
        return 1.0

    def budget(self, seconds, repetitions):
        return Budget(seconds, repetitions, lambda: self.now_s)


def test_points_take_turns_and_their_first_run_does_not_count():
    machine = Machine()
    taken = in_turns("ab", machine.run, machine.budget(100, 2), no_tick)
    assert machine.ran == list("ababab")
    assert {point: len(samples) for point, samples in taken.items()} == {"a": 2, "b": 2}


def test_a_point_shows_the_spread_of_its_timings():
    assert points({(256, 0): [1.0, 3.0, 2.0]}, "tokens", "context_tokens") == {
        "points": [{"tokens": 256, "context_tokens": 0, "median_s": 2.0, "min_s": 1.0, "max_s": 3.0, "n": 3}]
    }


def test_a_report_holds_the_curves_that_were_measured():
    costs = CostModel.from_mapping(profile_of(measured()))
    assert costs.prefill_s(4096, 1024) == pytest.approx(prefill_s(4096, 1024), rel=1e-3)
    assert costs.dram.bytes_per_s == pytest.approx(1e9, rel=1e-3)
    assert costs.dram.fixed_s == pytest.approx(0.001, rel=1e-2)
    assert costs.ssd.bytes_per_s == pytest.approx(1e9, rel=1e-3)
    assert costs.kv_bytes_per_token == 2 * 2 * 2 * 64 * 2
    assert (costs.prefill.samples, costs.dram.samples, costs.ssd.samples) == (36, 12, 12)


def test_a_report_survives_yaml_and_shows_every_point():
    profile = yaml.safe_load(yaml.safe_dump(profile_of(measured(noise=0.02))))
    origin = profile["provenance"]
    assert CostModel.from_mapping(profile).measured
    assert len(origin["prefill_fit"]["points"]) == len(origin["prefill_fit"]["relative_residuals"]) == 12
    assert profile["dram_store"]["bytes_per_s"] == pytest.approx(5e8, rel=0.05)
    assert len(origin["steps"]["points"]) == 8


def test_a_run_without_time_for_a_step_says_so():
    with pytest.raises(ProfileError, match="no step was timed.*--budget-s"):
        profile_of(replace(measured(), steps={}))


def test_lmcache_stays_out_until_the_engine_is_up():
    """It imports numba, with which vLLM 0.32's CPU worker fails to start in the same process."""
    code = "import sys, profiles.measure; sys.exit('lmcache' in sys.modules or 'numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.fixture
def files(tmp_path):
    with disk_timing.chunk_files(tmp_path, 64 * 1024, count=4) as files:
        yield files


def test_the_disk_gives_back_what_was_written(files):
    written = [bytes(buffer[:]) for buffer in files._buffers]
    files.move("store", [0, 1, 2, 3])
    for buffer in files._buffers:
        buffer.seek(0)
        buffer.write(bytes(files.chunk_bytes))
    files.move("load", [0, 1, 2, 3])
    assert [bytes(buffer[:]) for buffer in files._buffers] == written


def test_chunks_that_o_direct_cannot_read_go_through_the_page_cache(tmp_path):
    with disk_timing.chunk_files(tmp_path, 1000, count=1) as files:
        assert not files.direct
        files.move("store", [0])
        files.move("load", [0])
    assert list(tmp_path.iterdir()) == []


def ones(mover):
    """How many values of the pages are 1."""
    return mover._pages.eq(1).sum().item()


def test_copies_move_every_chunk_the_way_they_say(monkeypatch):
    pytest.importorskip("lmcache")
    from profiles import copy_timing

    monkeypatch.setitem(copy_timing.POOL_BYTES, "cpu", 128 * CHUNK_BYTES)
    mover = copy_timing.Mover(SHAPE, 256, "cpu")
    mover.load([0, 1])
    mover._pages.fill_(7)
    mover.store([2])
    assert mover._host[2].eq(7).all()
    assert mover._host[3].eq(1).all()
    mover.load([3])
    assert ones(mover) == mover._host[3].numel()
    mover.load(list(range(3, 100)))
    assert ones(mover) >= 97 * mover._host[3].numel(), "two chunks went to the same blocks"
    taken = time_moves([1, 2], mover.chunks, mover.move, Budget(600, 1), no_tick)
    assert set(taken) == {("load", 1), ("store", 1), ("load", 2), ("store", 2)}
