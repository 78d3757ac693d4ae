"""The demo's parts that need no server: its scenario, its servers' options, its texts."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from test_tables import summary

from continuum_lmcache.errors import TraceError
from experiments import demo, demo_report, demo_servers
from experiments.demo_scenario import (
    ARRIVALS,
    START_FACTOR,
    Measured,
    Work,
    pressed,
    pressure,
    rate,
)
from experiments.demo_servers import CONTINUUM, FCFS, refuse_failures, with_tiers
from experiments.driver import TurnRecord
from experiments.mp_server import MpProcess
from experiments.replay import Job, cut_s, new_tokens
from experiments.server import ServerError
from experiments.sweep import conditions
from experiments.tables import between

WORK = Work.of(demo.workload(None, 1).programs(), limited=False)
MACHINES = {  # seconds to a server's start, a turn alone, and work a second
    "fast": Measured(12.0, 0.12, 2900.0),
    "slow": Measured(22.0, 0.30, 1000.0),
    "slow, at half its speed": Measured(40.0, 0.60, 500.0),
}
LEFT_S = 370.0


@pytest.fixture(params=MACHINES)
def machine(request):
    return MACHINES[request.param]


def record(program, turn, first_s, done_s, prompt=100, output=10, of_turns=2, arrive_s=0.0, error=None):
    return TurnRecord(
        program, turn, of_turns, arrive_s, arrive_s, first_s, done_s, prompt, output, None, 0.0, error
    )


def test_on_any_machine_twice_as_many_programs_come_as_it_finishes(machine):
    scenario = pressed(machine, WORK, LEFT_S, 3)
    assert scenario.programs >= 12
    for seed in (1, 2, 3):
        programs = demo.workload(None, seed, scenario).programs()
        jps = (len(programs) - 1) / programs[-1].arrival_s
        assert jps == pytest.approx(ARRIVALS * scenario.capacity_jps)


def test_on_any_machine_half_of_the_programs_need_far_more_than_gpu_and_dram_hold(machine):
    """Of a backlog that grows at half the rate of the arrivals, half is there when the last one comes."""
    scenario = pressed(machine, WORK, LEFT_S, 3)
    for seed in (1, 2, 3):
        programs = demo.workload(None, seed, scenario).programs()
        contexts = [turn.input_tokens for program in programs for turn in program.turns]
        under_way = sum(contexts) / len(contexts) * len(programs) / 2
        assert under_way > 1.2 * (scenario.gpu_tokens + scenario.dram_tokens)


def test_on_any_machine_every_prompt_fits_the_gpu_and_the_free_part_of_dram(machine):
    scenario = pressed(machine, WORK, LEFT_S, 3)
    longest = max(p.context_tokens for p in demo.workload(None, 1, scenario).programs())
    assert longest <= scenario.window_tokens <= scenario.gpu_tokens
    assert (1 - scenario.watermark) * scenario.l1_tokens >= scenario.window_tokens


@pytest.mark.parametrize("name", ["fast", "slow"])
def test_all_servers_start_and_replay_within_the_time_that_is_left(name):
    scenario = pressed(MACHINES[name], WORK, LEFT_S, 3)
    assert 3 * (START_FACTOR * MACHINES[name].start_s + scenario.limit_s) <= LEFT_S


def test_a_trace_without_a_program_of_several_turns_is_an_error(tmp_path):
    trace = tmp_path / "trace.jsonl"
    turn = {"input_tokens": 9, "new_tokens": 9, "output_tokens": 1}
    trace.write_text(json.dumps({"program_id": "p", "arrival_s": 0.0, "turns": [turn]}) + "\n")
    with pytest.raises(TraceError, match="none has 3 turns"):
        demo_servers.alone_seed(demo.workload(trace, 1))


def test_continuum_differs_from_the_baselines_in_its_connector_its_module_and_its_own_settings(tmp_path):
    mp = MpProcess(0.1, tmp_path, tmp_path / "log")
    ours, stock = CONTINUUM.transfer_config(mp), FCFS.transfer_config(mp)
    extra = ours["kv_connector_extra_config"]
    assert {k: v for k, v in extra.items() if "continuum" not in k} == stock["kv_connector_extra_config"]
    assert "connectors.lmcache_mp_module" in " ".join(mp.command())
    without = replace(mp, module=False).command()
    assert [word for word in mp.command() if word not in without] == [
        "--server-module",
        '{"module_path": "connectors.lmcache_mp_module"}',
    ]


def test_the_rate_is_the_work_done_while_the_batch_was_full():
    turns = [record("p", n, 0.0, float(n), prompt=100 * n, output=10, of_turns=5) for n in (1, 2, 3, 4)]
    last = record("p", 5, 0.0, 60.0, prompt=500, output=10, of_turns=5)
    once = 4 * 10 + 50
    assert rate([*turns, last], 5) == (100 + 3 * (100 - 10) + 4 * once) / 4.0
    assert rate(turns[:2], 5) == (100 + 90 + 2 * once) / 2.0  # cut off by the time limit


def test_lmcaches_tokens_are_split_as_its_server_counted_them_and_what_is_not_new_was_computed_again():
    found = summary("fcfs", 1, [3.0], cut_s=[5.0], new_tokens=60)
    found["tokens_by_source"] = {"gpu": 10, "offload": 40, "computed": 100}
    found_of = with_tiers(found, {"dram": 30.0, "ssd": 90.0})
    assert found_of["tokens_by_source"] == {"gpu": 10, "dram": 10, "ssd": 30, "again": 40, "computed": 60}
    assert found_of["job_time_s"]["mean"] == 4.0  # the one that was cut off counts with its time so far


def test_a_program_that_the_limit_cut_off_had_run_since_it_arrived():
    programs = demo.workload(None, 1).programs()[:3]
    first, second, third = (replace(p, arrival_s=s) for p, s in zip(programs, (0.0, 4.0, 30.0), strict=True))
    over = record(first.program_id, 2, 1.0, 2.0)
    under_way = record(second.program_id, 1, 5.0, 6.0)
    assert cut_s((first, second, third), [over, under_way], 10.0) == [6.0]
    assert cut_s((first, second, third), [over, under_way], None) == []
    assert new_tokens((second,), [under_way]) == second.turns[0].new_tokens


def test_the_check_says_that_the_pressure_held_only_if_every_proportion_did():
    def under_pressure(jps, lost):
        summary = {"prompt_tokens": 1000, "new_tokens": 0, "tokens_by_source": {"gpu": 1000 * (1 - lost)}}
        return demo_report.verdict(pressure(summary, [i / jps for i in range(30)], best_jobs_per_s=1.0))

    assert under_pressure(1.3, 0.6).startswith("The pressure held")
    for said in (under_pressure(1.0, 0.6), under_pressure(1.3, 0.1)):
        assert said.startswith("**The pressure did not hold**") and "**not the" in said


def measured_paths(folder, **job_times_s):
    """Summaries and turns of one seed, by contender, as the servers' runs leave them."""
    paths = {}
    for who, times_s in ((FCFS, job_times_s["fcfs"]), (CONTINUUM, job_times_s["continuum"])):
        content = summary(who.label, 1, times_s, cut_s=[], new_tokens=70, prompt_tokens=100, jobs_per_s=1.0)
        content["first_ttft_s"] = content["later_ttft_s"] = content["ttft_s"]
        path = folder / f"{who.label}-seed1.json"
        path.write_text(json.dumps(content))
        turns = [record(f"p{i}", 1, 1.0, job_s, of_turns=1) for i, job_s in enumerate(times_s)]
        path.with_suffix(".jsonl").write_text("".join(json.dumps(vars_of(r)) + "\n" for r in turns))
        paths[who.name] = path
    return paths


def test_a_report_has_one_table_and_one_figure_with_the_baseline_first(tmp_path):
    paths = measured_paths(tmp_path, fcfs=[3.0], continuum=[2.0])
    page = demo_report.write(paths, tmp_path, Console(quiet=True))
    said = (tmp_path / "comparison.md").read_text()
    assert page in said and conditions.machine() in said
    assert "|  | fcfs + LMCache | continuum + LMCache |" in said and "| 1 | 1.5 |" in said
    assert said.startswith(
        "Agents finished 1.5 times as soon as with stock vLLM and LMCache (2 s for 3). The price: a new "
        "agent waited up to 1 s for its first token (up to 1 s with stock vLLM and LMCache).\n"
    )
    assert all((tmp_path / f"comparison.{kind}").exists() for kind in ("csv", "png", "svg"))


def test_where_other_work_ran_beside_a_server_no_number_is_the_result(tmp_path):
    paths = measured_paths(tmp_path, fcfs=[3.0], continuum=[2.0])
    instead = demo_report.busy([1.0, 1.02, 0.98, 1.3], [0.01, 0.02, 0.45])
    assert "Other work had up to 45% of its cores" in instead and "1.33 times as long" in instead
    page = demo_report.write(paths, tmp_path, Console(quiet=True), instead)
    assert page.startswith("No result: ") and "1.5 times as soon" not in page
    assert demo_report.excerpt(page).startswith("**No result: ")


@pytest.mark.parametrize(
    ("probes_s", "others", "is_busy"),
    [
        ([1.0, 1.1, 1.0, 1.0], [0.02, 0.05, 0.09], False),
        ([1.0, 1.0, 1.0, 1.2], [0.02, 0.02, 0.02], True),  # a slower machine at the end
        ([1.0, 1.0, 1.0, 1.0], [0.02, 0.02, 0.2], True),  # other work during the last server alone
    ],
)
def test_the_servers_are_compared_only_if_each_had_the_machine_alone(probes_s, others, is_busy):
    assert bool(demo_report.busy(probes_s, others)) == is_busy


def test_the_work_of_others_is_seen_and_that_of_an_ended_child_is_this_process_own():
    spin = "import time\nwhile time.process_time() < 1: pass"
    before_s = conditions.other_work_s()
    child = subprocess.Popen([sys.executable, "-c", spin])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody has waited for it
    as_another_s, began_s = conditions.other_work_s(), time.monotonic()
    child.wait()
    as_own_s, cores_s = conditions.other_work_s(), os.cpu_count() * (time.monotonic() - began_s)
    assert as_another_s - before_s > 0.9
    assert as_own_s - as_another_s < cores_s - 0.9


def test_where_the_time_limit_cut_programs_off_the_page_begins_with_how_many_finished(tmp_path):
    paths = measured_paths(tmp_path, fcfs=[6.0, 9.0], continuum=[4.0, 5.0])
    for who, finished, cut in ((FCFS, 1, [9.0]), (CONTINUUM, 2, [])):
        path = paths[who.name]
        content = json.loads(path.read_text()) | {"finished": finished, "cut_s": cut, "wall_s": 9.4}
        path.write_text(json.dumps(content))
    assert demo_report.write(paths, tmp_path, Console(quiet=True)).startswith(
        "2 of 2 agents finished within 9 s, with stock vLLM and LMCache 1: at least 1.67 times as soon. "
    )


def vars_of(turn):
    return {name: getattr(turn, name) for name in TurnRecord.__slots__}


def test_the_readme_shows_the_chief_rows_of_the_demos_page_unedited():
    root = Path(__file__).parents[1]
    page = (root / "experiments/records/demo/comparison.md").read_text().partition("\n![figure]")[0]
    readme = (root / "README.md").read_text()
    assert between(readme, demo_report.README_MARKS, demo_report.excerpt(page)) == readme


def test_failed_turns_end_the_demo_with_the_first_reason_and_the_end_of_the_servers_log(tmp_path):
    job = Job("http://127.0.0.1:1/v1", "fcfs", demo.workload(None, 1), tmp_path)
    failed = record("p", 1, None, None, error="HTTP 500: out of memory")
    job.path.write_text(json.dumps(vars_of(failed)) + "\n")
    log = tmp_path / "server.log"
    log.write_text("the last words\n")
    with pytest.raises(ServerError, match="1 turns failed under fcfs.*HTTP 500(.|\n)*the last words"):
        refuse_failures({"errors": 1}, job, log)


def test_a_trace_that_is_missing_is_known_before_a_server_starts(tmp_path):
    with pytest.raises(SystemExit, match="demo: .*missing.jsonl"):
        demo.main(
            trace=tmp_path / "missing.jsonl",
            readme=False,
            out=tmp_path,
        )
