"""The loaders on real traces, if they are beside the checkout, or in TRACES_DIR."""

import os
from pathlib import Path

import pytest

from experiments.selection import Selection
from experiments.workload import load_trace, scaled, unknown_gaps

TRACES = Path(os.environ.get("TRACES_DIR", Path(__file__).parents[2] / "shared" / "traces"))
# programs, turns, gaps that are not recorded: as the traces' own README and files say
KNOWN = {
    "agentcgroup.jsonl": (128, 5_241, 0),
    "weka_claude_code.jsonl": (451, 27_760, 2_809),
    "mooncake_conversation.jsonl": (8_196, 12_031, 0),
    "bfcl_v4_multi_turn.jsonl": (589, 6_884, 6_295),
    "lmcache_miniswe.jsonl": (20, 402, 382),
}


@pytest.fixture(params=KNOWN)
def trace(request):
    path = TRACES / request.param
    if not path.exists():
        pytest.skip(f"the trace {request.param} is not here; set TRACES_DIR to a folder that has it")
    return path


def test_a_real_trace_is_read_whole(trace):
    programs = load_trace(trace)
    turns = sum(len(program.turns) for program in programs)
    assert (len(programs), turns, unknown_gaps(programs)) == KNOWN[trace.name]


def test_a_real_trace_fits_a_small_window_after_scaling(trace):
    small = scaled(load_trace(trace), 8192)
    assert 7_000 < max(program.context_tokens for program in small) <= 8192
    for program in small:
        history = 0
        for turn in program.turns:
            assert 0 <= turn.kept_tokens <= history
            history = turn.context_tokens


def test_a_real_trace_can_be_replayed_whole(trace):
    chosen = Selection(1, trace, jps=1.0, max_context_tokens=8192).programs(lambda _: None)
    assert unknown_gaps(chosen) == 0
    assert [p.arrival_s for p in chosen] == sorted(p.arrival_s for p in chosen)
